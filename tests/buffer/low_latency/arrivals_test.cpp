// Arrival counters of low-latency dispatch: another kernel reads rows while the call still receives.
#include <algorithm>

#include "deep_ep/arrivals.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_case.hpp"
#include "tests/kernels/consumers/arrivals.hpp"
#include "tests/kernels/test_kernel.hpp"

namespace deep_ep::test {
namespace {

using oracle::RowFormat;

class LowLatencyArrivalsTest : public ClusterTest {};
DEEP_EP_LOW_LATENCY_ON_THREADS(LowLatencyArrivalsTest);

class LowLatencyRailsArrivalsTest : public ClusterTest {};
DEEP_EP_BY_RAILS(LowLatencyRailsArrivalsTest);

/// Words for one case, and a kernel on a stream of its own that copies what they say is there.
class ArrivalsConsumer {
 public:
  ArrivalsConsumer(Rank& rank, const LowLatencyCaseShape& shape, int rows_of_word)
      : rank_(rank), rows_of_word_(rows_of_word) {
    blocks_ = shape.local_experts;
    rows_ = shape.max_tokens * shape.ranks();
    words_of_block_ = rows_of_word == 0 ? 1 : (rows_ + rows_of_word - 1) / rows_of_word;
    words_ = rank.upload(std::vector<std::int64_t>(index(blocks_ * words_of_block_)), DType::int64,
                         {blocks_, words_of_block_});
    stream_ = rank.executor()->create_stream();
    row_bytes_ = shape.hidden * (shape.format == RowFormat::bf16 ? 2 : 1);
    marks_ = rank.upload(std::vector<std::int32_t>(2), DType::int32, {2});
    for (const std::int64_t bytes : {row_bytes_, row_bytes_ / 16, std::int64_t{4}, std::int64_t{4}}) {
      copies_.push_back(static_cast<std::byte*>(rank.allocate(index(blocks_ * rows_ * bytes))));
    }
  }
  ~ArrivalsConsumer() {
    rank_.executor()->synchronize(stream_);
    rank_.executor()->destroy_stream(stream_);
  }
  ArrivalsConsumer(const ArrivalsConsumer&) = delete;

  /// Before the call: what is copied lands on junk.
  void add_to(LowLatencyDispatchArguments& arguments) const {
    arguments.arrival_counters = words_;
    arguments.arrival_rows = rows_of_word_;
    const std::size_t rows = index(blocks_ * rows_);
    rank_.executor()->fill(copies_[0], 0xa5, rows * index(row_bytes_), stream_);
    for (std::size_t i = 2; i < copies_.size(); ++i) rank_.executor()->fill(copies_[i], 0xa5, rows * 4, stream_);
    rank_.executor()->synchronize(stream_);
  }

  /// To be called as often as dispatch was. The rows may arrive whenever they like.
  void begin(const LowLatencyDispatchResult& from, double timeout_s = 60) {
    kept_ = from;  // the kernel below reads it, on a stream of its own
    copy_ = from;
    const auto copy = [&](Tensor& tensor, std::size_t which) {
      TensorView view = tensor.view();
      view.data = copies_[which];
      tensor = Tensor::borrow(view);
      return copies_[which];
    };
    consumers::ArrivalsParams params{
        .words = words_.as<std::int64_t>(),
        .blocks = static_cast<int>(blocks_),
        .words_of_block = static_cast<int>(words_of_block_),
        .rows_of_word = static_cast<int>(rows_of_word_ == 0 ? rows_ : rows_of_word_),
        .calls = ++calls_,
        .timeout_ns = static_cast<std::uint64_t>(timeout_s * 1e9),
        .rows = static_cast<int>(rows_),
        .row_bytes = static_cast<int>(row_bytes_),
        .scale_columns = from.recv_x_scales ? static_cast<int>(from.recv_x_scales->size(2)) : 0,
        .recv_x = from.recv_x.as<std::byte>(),
        .recv_scales = from.recv_x_scales ? from.recv_x_scales->as<std::byte>() : nullptr,
        .recv_count = from.recv_count.as<std::int32_t>(),
        .src_info = from.handle.src_info.as<std::int32_t>(),
        .x = copy(copy_.recv_x, 0),
        .scales = copy_.recv_x_scales ? copy(*copy_.recv_x_scales, 1) : nullptr,
        .count = reinterpret_cast<std::int32_t*>(copy(copy_.recv_count, 2)),
        .src = reinterpret_cast<std::int32_t*>(copy(copy_.handle.src_info, 3)),
        .failed = marks_.as<std::int32_t>(),
        .expired = marks_.as<std::int32_t>() + 1};
    static const TestKernel<consumers::ArrivalsParams> kernel(DEEP_EP_TEST_LAUNCHERS(copy_arrivals));
    kernel(*rank_.executor(), stream_, {3, 64, 1024}, params);
  }

  /// What has been copied, as a result of dispatch.
  const LowLatencyDispatchResult& end() {
    rank_.executor()->synchronize(stream_);
    const auto marks = rank_.download<std::int32_t>(marks_);
    require(marks[0] == 0, "no word says that the call has failed");
    require(marks[1] == 0, "all words are complete in time");
    return copy_;
  }

  /// Behind everything: no word has more or less than it should.
  void check_words() {
    const auto words = rank_.download<std::int64_t>(words_);
    require_same(std::vector<std::int64_t>(words.size(), calls_ * kArrivalStep), words, "words after all calls");
  }

  /// How many words have said that the call has failed.
  std::int64_t failed_words() {
    rank_.executor()->synchronize(stream_);
    const auto marks = rank_.download<std::int32_t>(marks_);
    require(marks[1] == 0, "all words have said something in time");
    return marks[0];
  }
  std::int64_t words() const { return blocks_ * words_of_block_; }

 private:
  Rank& rank_;
  int rows_of_word_;
  std::int64_t blocks_, rows_, words_of_block_, row_bytes_, calls_ = 0;
  std::vector<std::byte*> copies_;  ///< of rows, scales, counts, tokens
  TensorView words_, marks_;
  StreamHandle stream_ = nullptr;
  LowLatencyDispatchResult kept_, copy_;
};

/// Each shape several times with the same words, without and with hooks; what the kernel copied is checked, and what
/// lies there in the end.
void consume_all(const ClusterOptions& options, const std::vector<LowLatencyCaseShape>& shapes,
                 const std::vector<int>& rows_of_word, int calls = 2) {
  std::vector<LowLatencyCase> cases;
  std::int64_t max_tokens = 1;
  std::int64_t hidden = 1;
  for (const LowLatencyCaseShape& shape : shapes) {
    cases.push_back(make_low_latency_case(shape));
    max_tokens = std::max(max_tokens, shape.max_tokens);
    hidden = std::max(hidden, shape.hidden);
  }
  run_cluster(options, [&](Rank& rank) {
    Buffer& buffer = rank.buffer(low_latency_options(rank.size(), max_tokens, hidden));
    for (std::size_t i = 0; i < cases.size(); ++i) {
      {
        ArrivalsConsumer consumer(rank, cases[i].shape, rows_of_word[i % rows_of_word.size()]);
        for (int call = 0; call < calls; ++call) {
          LowLatencyDispatchArguments arguments = upload_arguments(rank, cases[i]);
          consumer.add_to(arguments);
          arguments.return_recv_hook = call % 2 == 1;
          const LowLatencyDispatchResult result = buffer.low_latency_dispatch(arguments, rank.call());
          consumer.begin(result);
          if (result.hook) result.hook();
          check_low_latency_dispatch(rank, cases[i], result);
          check_low_latency_dispatch(rank, cases[i], consumer.end());
        }
        consumer.check_words();
      }
      rank.release();
    }
    buffer.check();
    buffer.destroy();
  });
}

std::vector<LowLatencyCaseShape> arrival_shapes(int ranks) {
  std::vector<LowLatencyCaseShape> shapes;
  for (const RowFormat format : {RowFormat::bf16, RowFormat::fp8, RowFormat::fp8_ue8m0}) {
    LowLatencyCaseShape shape{.tokens = equal_tokens(ranks, 5), .max_tokens = 5, .hidden = 1024, .format = format};
    shape.seed = shapes.size() + 1;
    shapes.push_back(shape);
  }
  shapes.push_back({.tokens = equal_tokens(ranks, 7), .max_tokens = 9, .hidden = 512, .topk = 3});
  return shapes;
}

TEST_P(LowLatencyArrivalsTest, RowsAreThereWhenTheWordsSaySo) {
  consume_all(cluster(2), arrival_shapes(2), {4, 0, 1, 2}, 4);
}

TEST_P(LowLatencyArrivalsTest, ACallThatFailsTellsThoseWhoPoll) {
  if (GetParam().topology != Topology::one_node) GTEST_SKIP() << "the same code, and it takes a deadline";
  const LowLatencyCaseShape shape{.tokens = equal_tokens(2, 4)};
  const LowLatencyCase one = make_low_latency_case(shape);
  run_cluster(cluster_with_absentees(2), [&](Rank& rank) {
    BufferOptions options = low_latency_options(2, 4, 512, 1);  // rank 1 never comes
    Buffer& buffer = rank.buffer(options);
    if (rank.rank() == 0) {
      ArrivalsConsumer consumer(rank, shape, 4);
      LowLatencyDispatchArguments arguments = upload_arguments(rank, one);
      consumer.add_to(arguments);
      consumer.begin(buffer.low_latency_dispatch(arguments, rank.call()), 300);
      require(consumer.failed_words() == consumer.words(), "every word says so");
      require_throws<TimeoutError>([&] { buffer.check(); }, {"rank 1"}, "the call");
    }
    rank.bootstrap()->barrier();
  });
}

TEST_P(LowLatencyRailsArrivalsTest, RowsThatAreHandedOn) { consume_all(cluster(4), arrival_shapes(4), {4, 8}); }

/// A consumer that polls sees complete rows, under many schedules of the CPU executor.
TEST(LowLatencyArrivalsScheduleTest, EverySeedShowsCompleteRows) {
  const std::vector<LowLatencyCaseShape> shapes = {
      {.tokens = {5, 0, 7}, .max_tokens = 7, .hidden = 256, .topk = 3, .routing = oracle::Routing::some_dropped},
      {.tokens = {4, 1, 4}, .max_tokens = 4}};
  under_schedules({.usually = 25, .sanitized = 3, .thread_sanitized = 2}, [&](std::uint64_t seed) {
    ClusterOptions options{.ranks = 3, .host = {.multiprocessors = 2, .warps_per_block = 2, .seed = seed}};
    consume_all(options, shapes, {4, 1});
  });
}

}  // namespace
}  // namespace deep_ep::test
