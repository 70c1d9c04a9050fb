#include "tools/bench/selftest_rank.hpp"

#include <fmt/format.h>

#include <cstring>
#include <span>

#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

template <class T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

/// -0 and +0 are one sum.
bool same_sum(std::uint16_t one, std::uint16_t other) {
  return one == other || oracle::bf16_value(one) == oracle::bf16_value(other);
}

}  // namespace

std::string SelftestCase::name() const {
  const auto word = [](bool value) { return value ? "True" : "False"; };
  return fmt::format("Running with {}, {} top-k (async={}, previous={})", fp8 ? "FP8" : "BF16",
                     topk ? "with" : "without", word(async), word(previous));
}

std::vector<SelftestCase> selftest_cases(int nodes) {
  struct Rows {
    bool fp8;
    bool worst;
  };
  std::vector<Rows> rows = {{false, false}, {false, true}, {true, false}};
  if (nodes > 1) rows.push_back({true, true});
  std::vector<SelftestCase> cases;
  for (const bool previous : {false, true}) {
    for (const bool async : {false, true}) {
      for (const auto& [fp8, worst] : rows) {
        for (const bool topk : {false, true}) cases.push_back({previous, async, fp8, topk, worst});
      }
    }
  }
  return cases;
}

SelftestTruth::SelftestTruth(const WorkloadShape& shape) {
  for (const bool fp8 : {false, true}) {
    for (const bool topk : {false, true}) {
      std::vector<oracle::DispatchInput> inputs;
      for (int rank = 0; rank < shape.ranks; ++rank) {
        const HostInputs made = make_inputs(shape, rank);
        oracle::DispatchInput input;
        input.tokens = shape.tokens;
        input.row_bytes = static_cast<std::size_t>(shape.hidden) * (fp8 ? 1 : 2);
        input.x = fp8 ? bytes_of(made.bits8) : bytes_of(made.bf16);
        if (fp8) {
          input.scales_per_row = shape.scales();
          input.scales.resize(made.scales.size());
          std::memcpy(input.scales.data(), made.scales.data(), made.scales.size() * sizeof(float));
        }
        const oracle::Selection selection{shape.tokens, shape.topk, made.selection, made.weights};
        input.layout = oracle::layout(selection, shape.ranks, shape.experts);
        if (topk) input.selection = selection;
        inputs.push_back(std::move(input));
      }
      dispatched_[index(fp8, topk)] = oracle::dispatch(inputs, shape.experts, 1);
    }
  }
  for (const bool topk : {false, true}) {
    const oracle::Dispatched& dispatched = dispatched_[index(false, topk)];
    std::vector<oracle::CombineInput> inputs;
    for (const oracle::Received& received : dispatched.received) {
      oracle::CombineInput input;
      input.x.resize(received.x.size() / 2);
      std::memcpy(input.x.data(), received.x.data(), received.x.size());
      if (topk) input.topk_weights = received.topk_weights;
      inputs.push_back(std::move(input));
    }
    combined_[topk ? 1 : 0] = oracle::combine(dispatched, inputs, shape.hidden, topk ? shape.topk : 0,
                                              shape.nodes > 1 ? shape.ranks_per_node() : 0);
  }
}

SelftestRank::SelftestRank(const WorkloadShape& shape, const SelftestTruth& truth,
                           const std::shared_ptr<Bootstrap>& bootstrap, const std::shared_ptr<Executor>& executor)
    : shape_(shape),
      truth_(truth),
      executor_(*executor),
      rank_(bootstrap->rank()),
      stream_(*executor),
      buffer_(bootstrap, executor,
              [&] {
                BufferOptions options;
                options.heap_bytes =
                    4 * Buffer::heap_bytes_hint(shape.ranks, shape.tokens, shape.row_bytes_bf16(), shape.topk);
                if (shape.nodes > 1) options.ranks_per_node = shape.ranks_per_node();
                return options;
              }()),
      inputs_(*executor, shape, rank_, stream_) {}

CallOptions SelftestRank::call(const SelftestCase& one) {
  CallOptions options{.stream = stream_, .previous_event = {}, .async_finish = one.async};
  if (one.previous) options.previous_event = executor_.record_event(stream_);
  return options;
}

void SelftestRank::finish(const SelftestCase& one, const EventHandle& event) {
  if (one.async) executor_.wait_event(stream_, event);
}

DispatchResult SelftestRank::dispatch(const SelftestCase& one) {
  const DispatchLayout layout =
      buffer_.get_dispatch_layout(inputs_.selection.view(), shape_.experts, {.stream = stream_});
  DispatchArguments arguments;
  inputs_.set_rows(arguments, one.fp8);
  arguments.use(layout);
  if (one.topk) {
    arguments.topk_idx = inputs_.selection.view();
    arguments.topk_weights = inputs_.weights.view();
  }
  if (one.worst) arguments.num_worst_tokens = shape_.ranks * shape_.tokens;
  DispatchResult result = buffer_.dispatch(arguments, call(one));
  finish(one, result.event);
  return result;
}

Tensor SelftestRank::dispatch_again(const SelftestCase& one, const DispatchHandle& handle, bool fp8) {
  CachedDispatchArguments arguments;
  inputs_.set_rows(arguments, fp8);
  arguments.handle = &handle;
  const CachedDispatchResult result = buffer_.cached_dispatch(arguments, call(one));
  finish(one, result.event);
  return result.recv_x;
}

void SelftestRank::check_rows(const char* what, const TensorView& tensor, const void* expected, std::size_t bytes) {
  // Of outputs of a fixed size, what comes behind the rows is not specified.
  if (tensor.bytes() < bytes) {
    throw Error(fmt::format("rank {} received {} bytes of {}, expected {}", rank_, tensor.bytes(), what, bytes));
  }
  const auto found = to_host<std::uint8_t>(executor_, tensor, stream_);
  const auto* right = static_cast<const std::uint8_t*>(expected);
  for (std::size_t i = 0; i < bytes; ++i) {
    if (found[i] == right[i]) continue;
    throw Error(fmt::format("{} of rank {}: byte {} is {:#04x}, expected {:#04x}", what, rank_, i, found[i], right[i]));
  }
}

void SelftestRank::combine(const SelftestCase& one, const DispatchResult& received, const TensorView& rows) {
  CombineArguments arguments;
  arguments.x = rows;
  arguments.handle = &received.handle;
  if (one.topk) arguments.topk_weights = received.recv_topk_weights->view();
  const CombineResult result = buffer_.combine(arguments, call(one));
  finish(one, result.event);
  const oracle::Combined& expected = truth_.combined(rank_, one.topk);
  const auto sums = to_host<std::uint16_t>(executor_, result.combined_x.view(), stream_);
  for (std::size_t i = 0; i < expected.x.size(); ++i) {
    if (same_sum(sums[i], expected.x[i])) continue;
    throw Error(fmt::format("sum {} of rank {} is {}, expected {}", i, rank_, oracle::bf16_value(sums[i]),
                            oracle::bf16_value(expected.x[i])));
  }
  if (!one.topk) return;
  check_rows("combined weights", result.combined_topk_weights->view(), expected.topk_weights.data(),
             expected.topk_weights.size() * sizeof(float));
}

void SelftestRank::run(const SelftestCase& one) {
  const oracle::Received& expected = truth_.received(rank_, one.fp8, one.topk);
  const DispatchResult received = dispatch(one);
  check_rows("rows", received.recv_x.view(), expected.x.data(), expected.x.size());
  if (one.fp8) {
    check_rows("scales", received.recv_x_scales->view(), expected.scales.data(), expected.scales.size() * 4);
  }
  if (one.topk) {
    check_rows("selections", received.recv_topk_idx->view(), expected.topk_idx.data(), expected.topk_idx.size() * 8);
    check_rows("weights", received.recv_topk_weights->view(), expected.topk_weights.data(),
               expected.topk_weights.size() * 4);
    if (!one.worst && received.num_recv_tokens_per_expert != expected.tokens_per_expert) {
      throw Error(fmt::format("counts of the experts of rank {} are [{}], expected [{}]", rank_,
                              fmt::join(received.num_recv_tokens_per_expert, ", "),
                              fmt::join(expected.tokens_per_expert, ", ")));
    }
  }
  const Tensor again = dispatch_again(one, received.handle, one.fp8);
  check_rows("rows of the cached dispatch", again.view(), expected.x.data(), expected.x.size());
  // Experts that change nothing: their output is what BF16 rows would be.
  const Tensor rows = one.fp8 ? dispatch_again(one, received.handle, false) : received.recv_x;
  combine(one, received, rows.view());
  executor_.synchronize(stream_);
  buffer_.check();
}

void SelftestRank::destroy() {
  executor_.synchronize(stream_);
  buffer_.destroy();
}

}  // namespace deep_ep::tools
