#include "tests/cluster/low_latency_combine_case.hpp"

#include <cmath>
#include <utility>

#include "tests/cluster/case.hpp"

namespace deep_ep::test {
namespace {

constexpr std::uint16_t kNan = 0x7fc1;

}  // namespace

std::vector<oracle::Combined> LowLatencyCombineCase::expected(int ranks_per_node) const {
  oracle::LowLatencyCombineOptions how = options;
  if (ranks_per_node != 0) how.ranks_per_node = ranks_per_node;
  return oracle::low_latency_combine(before.dispatched, inputs, hidden, how);
}

LowLatencyCombineCase make_low_latency_combine_case(const LowLatencyCaseShape& shape, std::int64_t hidden) {
  LowLatencyCaseShape bf16 = shape;
  bf16.format = oracle::RowFormat::bf16;
  return make_combine_case_after(make_low_latency_case(bf16), hidden);
}

LowLatencyCombineCase make_combine_case_after(LowLatencyCase before, std::int64_t hidden) {
  require(before.shape.format == oracle::RowFormat::bf16, "combine cases follow a dispatch of bfloat16 rows");
  LowLatencyCombineCase one{.before = std::move(before), .hidden = hidden, .inputs = {}};
  if (hidden == 0) one.hidden = one.before.shape.hidden;
  const LowLatencyCaseShape& shape = one.before.shape;
  for (std::size_t r = 0; r < shape.tokens.size(); ++r) {
    const oracle::LowLatencyReceived& received = one.before.dispatched.received[r];
    oracle::LowLatencyCombineInput input;
    input.x.assign(received.src_info.size() * index(one.hidden), kNan);
    const std::uint64_t seed = oracle::derive_seed(shape.seed, 100 + r);
    for (std::size_t row = 0; row < received.src_info.size(); ++row) {
      if (received.src_info[row] < 0) continue;
      const auto values = random_bf16(one.hidden, oracle::derive_seed(seed, row));
      std::copy(values.begin(), values.end(), input.x.begin() + static_cast<std::int64_t>(row) * one.hidden);
    }
    input.selection = one.before.selections[r];
    one.inputs.push_back(std::move(input));
  }
  return one;
}

LowLatencyHandle dispatch_low_latency(Rank& rank, Buffer& buffer, const LowLatencyCombineCase& one, bool weights) {
  LowLatencyDispatchArguments arguments = upload_arguments(rank, one.before);
  const oracle::Selection& selection = one.inputs[index(rank.rank())].selection;
  if (weights) {
    arguments.combine_weights =
        rank.upload(selection.weights, DType::float32, {selection.tokens, one.before.shape.topk});
  }
  return buffer.low_latency_dispatch(arguments, rank.call()).handle;
}

LowLatencyCombineArguments upload_combine(Rank& rank, const LowLatencyCombineCase& one,
                                          const LowLatencyHandle& handle) {
  const LowLatencyCaseShape& shape = one.before.shape;
  const oracle::LowLatencyCombineInput& input = one.inputs[index(rank.rank())];
  const std::int64_t tokens = input.selection.tokens;
  LowLatencyCombineArguments arguments;
  arguments.x =
      rank.upload(input.x, DType::bfloat16, {shape.local_experts, shape.ranks() * shape.max_tokens, one.hidden});
  arguments.topk_idx = rank.upload_indices(input.selection.idx, shape.idx_dtype, {tokens, shape.topk});
  arguments.topk_weights = rank.upload(input.selection.weights, DType::float32, {tokens, shape.topk});
  arguments.handle = &handle;
  return arguments;
}

LowLatencyCombineArguments combine_anything(Rank& rank, const LowLatencyHandle& handle, const ConstTensorView& topk_idx,
                                            float weight) {
  LowLatencyCombineArguments arguments;
  arguments.handle = &handle;
  arguments.x = TensorView::contiguous(
      nullptr, DType::bfloat16,
      {handle.num_experts / rank.size(), std::int64_t{rank.size()} * handle.max_tokens, handle.hidden},
      rank.executor()->device());
  arguments.x.data = rank.allocate(arguments.x.bytes());
  arguments.topk_idx = topk_idx;
  const std::vector<float> weights(index(topk_idx.elements()), weight);
  arguments.topk_weights = rank.upload(weights, DType::float32, {topk_idx.shape[0], topk_idx.shape[1]});
  return arguments;
}

void change_selections(LowLatencyCombineCase& one, double gone, std::uint64_t seed) {
  oracle::Random random(seed);
  for (auto& input : one.inputs) {
    oracle::Selection& now = input.selection;
    for (std::size_t i = 0; i < now.idx.size(); ++i) {
      now.weights[i] *= -1.5f;
      if (random.chance(gone)) now.idx[i] = -1 - random.below(3);
    }
  }
}

void dispatch_and_combine(Rank& rank, Buffer& buffer, const LowLatencyCombineCase& one,
                          const std::vector<oracle::Combined>& expected) {
  const LowLatencyHandle handle = dispatch_and_check(rank, buffer, one.before).handle;
  const auto combined = buffer.low_latency_combine(upload_combine(rank, one, handle), rank.call());
  check_low_latency_combine(rank, one, expected, combined.combined_x.view());
}

void check_low_latency_combine(Rank& rank, const LowLatencyCombineCase& one,
                               const std::vector<oracle::Combined>& expected, const TensorView& combined) {
  const oracle::Combined& mine = expected[index(rank.rank())];
  const auto seen = rank.download<std::uint16_t>(combined);
  const std::string what = one.before.shape.describe() + ", combined hidden " + std::to_string(one.hidden);
  require_same(mine.x, seen, what, one.hidden);
  require(seen.size() == mine.sum.size(), what + ": wrong size");
  for (std::size_t i = 0; i < seen.size(); ++i) {
    const double value = static_cast<double>(oracle::bf16_value(seen[i]));
    require(std::fabs(value - mine.sum[i]) <= mine.tolerance[i],
            what + ": element " + std::to_string(i) + " is " + std::to_string(value) + ", expected " +
                std::to_string(mine.sum[i]) + " within " + std::to_string(mine.tolerance[i]));
  }
}

}  // namespace deep_ep::test
