#include "tools/bench/normal_mode_rank.hpp"

#include <vector>

#include "csrc/support/format.hpp"
#include "tools/common/check_rows.hpp"

namespace deep_ep::tools {
namespace {

BufferOptions buffer_options(const WorkloadShape& shape) {
  BufferOptions options;
  // The rows of one call may still be held while later ones ask for theirs.
  options.heap_bytes = 3 * Buffer::heap_bytes_hint(shape.ranks, shape.tokens, shape.row_bytes_bf16(), shape.topk);
  if (shape.nodes > 1) options.ranks_per_node = shape.ranks_per_node();
  return options;
}

}  // namespace

NormalModeRank::NormalModeRank(const RankTask& task)
    : task_(task),
      shape_(task.shape),
      executor_(*task.executor),
      rank_(task.rank()),
      stream_(executor_),
      buffer_(task.bootstrap, task.executor, buffer_options(shape_)),
      x_bf16_(executor_, DType::bfloat16, {shape_.tokens, shape_.hidden}),
      x_8bit_(executor_, DType::float8_e4m3, {shape_.tokens, shape_.hidden}),
      scales_(executor_, DType::float32, {shape_.tokens, shape_.scales()}),
      selection_(executor_, DType::int64, {shape_.tokens, shape_.topk}),
      weights_(executor_, DType::float32, {shape_.tokens, shape_.topk}) {
  x_bf16_.upload(filled_rows<std::uint16_t>(shape_, rank_, shape_.hidden, fill_row_bf16).data(), stream_);
  x_8bit_.upload(filled_rows<std::uint8_t>(shape_, rank_, shape_.hidden, fill_row_8bit).data(), stream_);
  scales_.upload(filled_rows<float>(shape_, rank_, shape_.scales(), fill_scales).data(), stream_);
  selection_.upload(make_selection(shape_, rank_).data(), stream_);
  weights_.upload(make_weights(shape_, rank_).data(), stream_);
}

template <class Arguments>
void NormalModeRank::set_rows(Arguments& arguments, bool fp8) const {
  arguments.x = fp8 ? x_8bit_.view() : x_bf16_.view();
  if (fp8) arguments.x_scales = scales_.view();
}

CallOptions NormalModeRank::options(const NormalModeCall& call) {
  CallOptions options{.stream = stream_, .async_finish = call.async};
  if (call.previous) options.previous_event = executor_.record_event(stream_);
  return options;
}

DispatchLayout NormalModeRank::layout() {
  return buffer_.get_dispatch_layout(selection_.view(), shape_.experts, {.stream = stream_});
}

DispatchResult NormalModeRank::dispatch(const NormalModeCall& call) {
  const DispatchLayout counts = layout();
  DispatchArguments arguments;
  set_rows(arguments, call.fp8);
  arguments.num_sms = call.num_sms;
  arguments.use(counts);
  if (call.topk) {
    arguments.topk_idx = selection_.view();
    arguments.topk_weights = weights_.view();
  }
  if (call.worst) arguments.num_worst_tokens = shape_.ranks * shape_.tokens;
  DispatchResult result = buffer_.dispatch(arguments, options(call));
  if (call.async) executor_.wait_event(stream_, result.event);
  return result;
}

DispatchResult NormalModeRank::dispatch_again(const DispatchHandle& handle, const NormalModeCall& call) {
  DispatchArguments arguments;
  set_rows(arguments, call.fp8);
  arguments.num_sms = call.num_sms;
  arguments.handle = &handle;
  DispatchResult result = buffer_.dispatch(arguments, options(call));
  if (call.async) executor_.wait_event(stream_, result.event);
  return result;
}

CombineResult NormalModeRank::combine(CombineArguments arguments, const NormalModeCall& call) {
  arguments.num_sms = call.num_sms;
  CombineResult result = buffer_.combine(arguments, options(call));
  if (call.async) executor_.wait_event(stream_, result.event);
  return result;
}

void NormalModeRank::check_rows_of(const DispatchResult& result, const NormalModeCall& call) {
  const oracle::Received& expected = task_.routes.received_by(rank_);
  const auto check = [&]<class T>(const char* what, const Tensor& tensor, std::int64_t columns, T, const auto& fill) {
    const auto width = static_cast<std::size_t>(columns);
    std::vector<T> rows = fetch<T>(tensor);
    // Of outputs of a fixed size, what comes behind the rows is not specified.
    if (call.worst) rows.resize(std::min(rows.size(), static_cast<std::size_t>(expected.rows) * width));
    check_rows(expected, rank_, what, rows, width, fill);
  };
  if (!call.fp8) return check("BF16 rows", result.recv_x, shape_.hidden, std::uint16_t{}, fill_row_bf16);
  check("8-bit rows", result.recv_x, shape_.hidden, std::uint8_t{}, fill_row_8bit);
  check("scales", result.recv_x_scales.value(), shape_.scales(), float{}, fill_scales);
}

void NormalModeRank::check_dispatched(const DispatchResult& result, const NormalModeCall& call) {
  check_rows_of(result, call);
  const oracle::Received& expected = task_.routes.received_by(rank_);
  if (!call.topk || expected.topk_idx.empty()) return;
  auto experts = fetch<std::int64_t>(result.recv_topk_idx.value());
  auto weights = fetch<float>(result.recv_topk_weights.value());
  if (call.worst) {
    experts.resize(std::min(experts.size(), expected.topk_idx.size()));
    weights.resize(std::min(weights.size(), expected.topk_weights.size()));
  }
  check_selection(expected, rank_, experts, weights);
  if (!call.worst) check_counts(expected, rank_, result.num_recv_tokens_per_expert);
}

void NormalModeRank::check_combined(const CombineResult& result) {
  std::vector<std::uint16_t> row(static_cast<std::size_t>(shape_.hidden));
  const auto sum_of = [&](std::int64_t token) {
    fill_row_bf16(rank_, token, row);
    const int width = shape_.ranks_per_node();
    std::vector<std::vector<oracle::WeightedRow>> rows(static_cast<std::size_t>(shape_.nodes * width));
    for (int node = 0; node < shape_.nodes; ++node) {  // which ranks of a node they come of makes no difference
      std::fill_n(rows.begin() + node * width, task_.routes.fan_out(rank_, token, node),
                  std::vector{oracle::WeightedRow{row}});
    }
    return oracle::combine_row(rank_, rows, shape_.hidden, width);
  };
  check_sums(rank_, shape_.tokens, shape_.hidden, fetch<std::uint16_t>(result.combined_x), /*exact=*/true, sum_of);
  // Every weight went to one rank and comes back from it alone, so it must be exactly the same number.
  if (result.combined_topk_weights && fetch<float>(*result.combined_topk_weights) != make_weights(shape_, rank_)) {
    fail<Error>("check: combined top-k weights of rank {} are not those sent", rank_);
  }
}

void NormalModeRank::destroy() {
  executor_.synchronize(stream_);
  buffer_.destroy();
}

std::vector<NormalModeCall> selftest_cases(int nodes) {
  std::vector<NormalModeCall> cases;
  for (int number = 0; number < 32; ++number) {
    const auto bit = [&](int which) { return (number >> which & 1) != 0; };
    const NormalModeCall one{.fp8 = bit(2), .topk = bit(0), .worst = bit(1), .async = bit(3), .previous = bit(4)};
    if (!one.fp8 || !one.worst || nodes > 1) cases.push_back(one);
  }
  return cases;
}

std::string name_of(const NormalModeCall& call) {
  const auto word = [](bool value) { return value ? "True" : "False"; };
  return fmt::format("Running with {}, {} top-k (async={}, previous={})", call.fp8 ? "FP8" : "BF16",
                     call.topk ? "with" : "without", word(call.async), word(call.previous));
}

void run_selftest_case(NormalModeRank& rank, const NormalModeCall& one) {
  const DispatchResult received = rank.dispatch(one);
  rank.check_dispatched(received, one);
  rank.check_rows_of(rank.dispatch_again(received.handle, one), one);
  // Experts that change nothing: their output is what BF16 rows would be.
  NormalModeCall wide = one;
  wide.fp8 = false;
  const DispatchResult rows = one.fp8 ? rank.dispatch_again(received.handle, wide) : received;
  CombineArguments arguments{.x = rows.recv_x.view(), .handle = &received.handle};
  if (one.topk) arguments.topk_weights = received.recv_topk_weights->view();
  rank.check_combined(rank.combine(arguments, one));
  rank.buffer().check();
}

}  // namespace deep_ep::tools
