// Parameters of the kernel that adds up how long low-latency calls wait for each rank. Plain data.
#pragma once

#include "kernels/low_latency/params.hpp"

namespace deep_ep {

/// What one source has cost this rank in calls of one kind. Zero to begin with.
struct LowLatencyWaited {
  std::uint64_t calls;   ///< in which this rank waited for the source, or would have
  std::int64_t cycles;   ///< in all of them
  std::int64_t longest;  ///< in one of them
};

/// What was found out while a call waited for the counts of one source.
struct LowLatencyHeard {
  std::int64_t cycles;
  std::int64_t came;  ///< 0: nothing came so far, or nobody listened
};

/// A launch takes one of them.
enum class LowLatencyWaitsStep : int {
  listen,  ///< before dispatch's receive part: when do the counts of each source come?
  add,     ///< after a receive part
  clock,   ///< how fast does the clock run in which the others count?
};

struct LowLatencyWaitsParams {
  LowLatencyParams common;
  LowLatencyWaitsStep step;
  LowLatencyKind kind;
  std::uint64_t patience_ns;  ///< `listen` ends then; the receive part goes on waiting

  // Of one call; the step that adds sets it to zero. [num_ranks] each.
  std::int64_t* cost;  ///< as the receive part measures it: its wait_cost
  LowLatencyHeard* heard;

  // Where `add` adds.
  LowLatencyWaited* waited;  ///< [num_ranks]
  std::int64_t* given;       ///< [num_ranks], the caller's statistics; nullptr: none

  // Of a combine.
  int blocks;  ///< that receive
  int num_tokens;
  Divisor num_topk;
  Divisor num_local_experts;
  TopkIndices topk_idx;  ///< [num_tokens, num_topk]

  std::int64_t* clock;  ///< [2], written: cycles, and the nanoseconds that they took
};

}  // namespace deep_ep
