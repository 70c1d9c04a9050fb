// One low-latency dispatch, for all ranks: what goes in, and what the oracle says must come out.
#pragma once

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "oracle/low_latency.hpp"
#include "oracle/routing.hpp"
#include "tests/cluster/cluster.hpp"

namespace deep_ep::test {

inline std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

struct LowLatencyCaseShape {
  std::vector<std::int64_t> tokens = {4, 4};  ///< one entry per rank
  std::int64_t max_tokens = 4;
  std::int64_t hidden = 512;
  int local_experts = 3;
  int topk = 4;
  oracle::Routing routing = oracle::Routing::uniform;
  oracle::RowFormat format = oracle::RowFormat::fp8;
  DType idx_dtype = DType::int64;
  oracle::Masks masks{};
  std::uint64_t seed = 1;

  int ranks() const { return static_cast<int>(tokens.size()); }
  int experts() const { return ranks() * local_experts; }
  std::string describe() const;
};

struct LowLatencyCase {
  LowLatencyCaseShape shape;
  std::vector<oracle::Selection> selections;  ///< of each rank, and its rows: bfloat16 bits
  std::vector<std::vector<std::uint16_t>> x;
  oracle::LowLatencyDispatched dispatched;
};

LowLatencyCase make_low_latency_case(const LowLatencyCaseShape& shape);
/// The same inputs, where the ranks leave each other out.
LowLatencyCase with_masks(const LowLatencyCase& one, const oracle::Masks& masks);
/// All others leave this rank out.
oracle::Masks masks_without(int ranks, int lost);

/// Upper limits of random shapes. Everything else may be anything that is allowed.
struct RandomShapeLimits {
  std::int64_t tokens, many_tokens;  ///< many: for one shape in five
  std::int64_t hidden;
  int local_experts;
};
LowLatencyCaseShape random_low_latency_shape(int ranks, std::uint64_t seed, const RandomShapeLimits& limits);

/// The arguments of a call that receives when its hook is called.
template <class Arguments>
Arguments with_hook(Arguments arguments, bool hook = true) {
  arguments.return_recv_hook = hook;
  return arguments;
}
/// The result of a call, whose hook is called here, if it has one.
template <class Result>
Result received(Result result) {
  if (result.hook) result.hook();
  return result;
}

/// Of two ranks, each sends calls 0 and 1. Rank 0 receives them and sends call 2, which takes the places of the first,
/// before rank 1 has received any. Both have received call 2 in the end.
template <class Send>
auto send_third_before_the_other_receives(Rank& rank, const Send& send) {
  std::vector results = {send(0), send(1)};
  rank.executor()->synchronize(rank.stream());
  for (const int sender : {0, 1}) {
    if (rank.rank() == sender) {
      for (int call = 0; call < 2; ++call) results[index(call)].hook();
      rank.executor()->synchronize(rank.stream());
      results.push_back(send(2));
      // Time enough to write where it must not. Less of it hides a mistake, and harms nothing.
      if (sender == 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    }
    rank.bootstrap()->barrier();
  }
  results[2].hook();
  return results;
}

/// An input as an output that a test will have refused.
inline TensorView writable(const ConstTensorView& view) { return {view, const_cast<void*>(view.data)}; }

/// Uploads what the rank hands to dispatch.
LowLatencyDispatchArguments upload_arguments(Rank& rank, const LowLatencyCase& one);

/// Every valid row, count and range against the oracle, and the handle's row table.
void check_low_latency_dispatch(Rank& rank, const LowLatencyCase& one, const LowLatencyDispatchResult& result);

/// A dispatch that receives at once, checked. A failure says which case it was.
LowLatencyDispatchResult dispatch_and_check(Rank& rank, Buffer& buffer, const LowLatencyCase& one, int num_sms = 0);

/// What low_latency_query_mask says of each rank.
std::vector<std::int32_t> query_masks(Rank& rank, Buffer& buffer);

/// With masking, by all ranks: three dispatches, in which what one rank posts to another fails. Either of the two is
/// left out then, by all others, and told so.
void require_one_left_out(Rank& rank, Buffer& buffer, const LowLatencyCase& one);

/// Enough memory for cases of at most so many tokens and channels. Time-out 0: the cluster's.
BufferOptions low_latency_options(int ranks, std::int64_t max_tokens, std::int64_t hidden, double timeout_s = 0,
                                  bool masking = false);

/// One dispatch after the other on one buffer, checked; `sms` in turn.
void run_dispatches(const ClusterOptions& cluster, const std::vector<LowLatencyCase>& cases,
                    const std::vector<int>& sms = {0});

}  // namespace deep_ep::test
