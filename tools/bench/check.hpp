// Compares the results of a benchmark's rounds with what the oracle says. Throws Error at the first difference.
#pragma once

#include "deep_ep/buffer.hpp"
#include "tools/bench/low_latency_rank.hpp"
#include "tools/bench/workload.hpp"

namespace deep_ep::tools {

/// Whose result it is, and where it lies.
struct CheckedRank {
  Executor& executor;
  StreamHandle stream;
  const WorkloadShape& shape;
  const Routes& routes;
  int rank;
};

void check_dispatched_bf16(const CheckedRank& rank, const CachedDispatchResult& result);
void check_dispatched_8bit(const CheckedRank& rank, const CachedDispatchResult& result);
/// With identity experts: every token comes back as often as it was sent.
void check_combined(const CheckedRank& rank, const CombineResult& result);

/// Every valid row with its scales, counts, ranges and token indices, bit for bit.
void check_low_latency_dispatch(const CheckedRank& rank, oracle::RowFormat format,
                                const LowLatencyDispatchResult& result);
/// Every sum, bit for bit. If calls may go by rails, their results, which round once more for each node, are right as
/// well.
void check_low_latency_combine(const CheckedRank& rank, LowLatencyCombine kind, const LowLatencyReach& reach,
                               const LowLatencyCombineResult& result);

}  // namespace deep_ep::tools
