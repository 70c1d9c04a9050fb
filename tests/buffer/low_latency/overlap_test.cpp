// Single-batch overlap: combine's send part runs while the program still writes rows, and takes each behind its signal.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"

namespace deep_ep::test {
namespace {

constexpr int kExpected = 3;
constexpr std::uint16_t kUnwritten = 0x7fc2;  ///< NaN

/// Stands for the program's GEMM: it has x, and writes it to where combine reads it, word by word.
class Producer {
 public:
  Producer(Rank& rank, LowLatencyCombineArguments& arguments, int signal_rows)
      : experts_(arguments.x.size(0)),
        rows_(arguments.x.size(1)),
        hidden_(arguments.x.size(2)),
        rows_of_word_(signal_rows == 0 ? rows_ : signal_rows),
        words_of_expert_((rows_ + rows_of_word_ - 1) / rows_of_word_),
        to_(writable(arguments.x).as<std::uint16_t>()),
        x_(to_, to_ + experts_ * rows_ * hidden_) {
    std::fill_n(to_, x_.size(), kUnwritten);
    const TensorView signals = rank.upload(std::vector<std::int32_t>(index(words())), DType::int32, {words()});
    signals_ = signals.as<std::int32_t>();
    arguments.return_recv_hook = true;
    arguments.overlap = {.signals = signals, .signal_rows = signal_rows, .expected = kExpected, .num_sms = 2};
  }

  std::int64_t words() const { return experts_ * words_of_expert_; }
  /// The row of x of an expert.
  std::uint16_t* row(std::int64_t expert, std::int64_t row) { return x_.data() + (expert * rows_ + row) * hidden_; }

  /// Writes the rows of a word, and then says so: kExpected times, as tiles of a GEMM do.
  void produce(std::int64_t word, int times = kExpected) {
    const std::int64_t expert = word / words_of_expert_;
    const std::int64_t first = word % words_of_expert_ * rows_of_word_;
    const std::int64_t begin = (expert * rows_ + first) * hidden_;
    const std::int64_t count = std::min(rows_of_word_, rows_ - first) * hidden_;
    for (int i = 0; i < times; ++i) {
      if (i == kExpected - 1) std::copy_n(x_.begin() + begin, count, to_ + begin);
      __atomic_fetch_add(signals_ + word, 1, __ATOMIC_RELEASE);
    }
  }

 private:
  std::int64_t experts_, rows_, hidden_, rows_of_word_, words_of_expert_;
  std::uint16_t* to_;
  std::vector<std::uint16_t> x_;
  std::int32_t* signals_ = nullptr;
};

ClusterOptions on_host(int ranks, std::uint64_t seed = 0) {
  ClusterOptions options{.ranks = ranks};
  if (seed != 0) options.host = {.multiprocessors = 3, .warps_per_block = 2, .seed = seed};
  return options;
}

/// The last rows come first. Bits are those of calls without overlap.
TEST(LowLatencyOverlapScheduleTest, EverySeedGivesTheSame) {
  std::vector<LowLatencyCombineCase> cases;
  for (const LowLatencyCaseShape& shape : std::vector<LowLatencyCaseShape>{
           {.tokens = {5, 0, 7}, .max_tokens = 7, .hidden = 256, .topk = 3, .routing = oracle::Routing::some_dropped},
           {.tokens = {4, 6, 1}, .max_tokens = 18, .topk = 3, .routing = oracle::Routing::duplicates},
           {.tokens = {4, 4, 4}, .max_tokens = 4, .hidden = 1024, .local_experts = 1, .topk = 2}}) {
    cases.push_back(make_low_latency_combine_case(shape));
  }
  under_schedules({.usually = 25, .sanitized = 3, .thread_sanitized = 2}, [&](std::uint64_t seed) {
    run_with_buffers(on_host(3, seed), low_latency_options(3, 18, 1024), [&](Rank& rank, Buffer& buffer) {
      for (const LowLatencyCombineCase& one : cases) {
        const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
        for (const int rows : {0, 1, 4}) {
          LowLatencyCombineArguments arguments = upload_combine(rank, one, handle);
          Producer producer(rank, arguments, rows);
          std::thread program([&] {
            for (std::int64_t word = producer.words(); word-- > 0;) producer.produce(word);
          });
          const LowLatencyCombineResult result = buffer.low_latency_combine(arguments, rank.call());
          program.join();
          result.hook();
          check_low_latency_combine(rank, one, one.expected(), result.combined_x.view());
        }
      }
      buffer.check();
    });
  });
}

/// Two ranks, two experts each; every token goes to all of them.
LowLatencyCombineCase four_experts() {
  return make_low_latency_combine_case(
      {.tokens = {4, 4}, .max_tokens = 4, .hidden = 256, .local_experts = 2, .topk = 4});
}

bool is_in(const TensorView& memory, std::uint64_t pattern) {
  const auto* words = reinterpret_cast<const std::uint64_t*>(memory.as<std::byte>());
  for (std::size_t i = 0; i < memory.bytes() / sizeof *words; ++i) {
    if (__atomic_load_n(words + i, __ATOMIC_RELAXED) == pattern) return true;
  }
  return false;
}

/// Rank 0 writes what its first expert made only when rank 1 has what its second one made.
TEST(LowLatencyOverlapTest, RowsThatAreThereDoNotWaitForOthers) {
  constexpr std::uint64_t kPattern = 0x4321432143214321;
  LowLatencyCombineCase one = four_experts();
  std::vector<std::uint16_t>& x = one.inputs[0].x;
  std::fill(x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end(), static_cast<std::uint16_t>(kPattern));
  std::vector<TensorView> memory(2);
  run_with_buffers(on_host(2), low_latency_options(2, 4, 256), [&](Rank& rank, Buffer& buffer) {
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
    memory[index(rank.rank())] = buffer.low_latency_memory();
    rank.executor()->synchronize(rank.stream());
    rank.bootstrap()->barrier();
    LowLatencyCombineArguments arguments = upload_combine(rank, one, handle);
    Producer producer(rank, arguments, 0);
    bool seen = true;
    std::thread program([&] {
      producer.produce(1);
      const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(patience() / 2);
      while (rank.rank() == 0 && !is_in(memory[1], kPattern)) {
        seen = std::chrono::steady_clock::now() < end;
        if (!seen) break;
        std::this_thread::yield();
      }
      producer.produce(0);
    });
    const LowLatencyCombineResult result = buffer.low_latency_combine(arguments, rank.call());
    program.join();
    require(seen, "rows of the second expert are sent before those of the first are there");
    result.hook();
    check_low_latency_combine(rank, one, one.expected(), result.combined_x.view());
  });
}

TEST(LowLatencyOverlapTest, ASignalThatIsNotRaisedIsNamed) {
  const LowLatencyCombineCase one = four_experts();
  ClusterOptions options = on_host(2);
  options.timeout_s = long_patience();
  run_cluster(options, [&](Rank& rank) {
    Buffer& buffer = rank.buffer(low_latency_options(2, 4, 256, short_deadline()));
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
    LowLatencyCombineArguments arguments = upload_combine(rank, one, handle);
    Producer producer(rank, arguments, 4);
    // Eight rows of an expert, four of a word: the second half of the second expert's is not there on rank 0.
    for (std::int64_t word = 0; word < 4; ++word) {
      producer.produce(word, rank.rank() == 0 && word == 3 ? kExpected - 1 : kExpected);
    }
    const auto call = [&] {
      const LowLatencyCombineResult result = buffer.low_latency_combine(arguments, rank.call());
      result.hook();
      buffer.check(true);
    };
    if (rank.rank() == 0) {
      require_throws<TimeoutError>(call, {"element 3 of the signals", "local expert 1", "to 3; it is 2"}, "combine");
    } else {
      require_throws<TimeoutError>(call, {"rank 0"}, "combine beside it");
    }
    rank.bootstrap()->barrier();
  });
}

TEST(LowLatencyOverlapTest, Arguments) {
  const LowLatencyCombineCase one = four_experts();
  run_cluster(on_host(2), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(low_latency_options(2, 4, 256));
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, one);
    LowLatencyCombineArguments good = upload_combine(rank, one, handle);
    const Producer producer(rank, good, 3);
    const auto refused = [&](const std::vector<std::string>& words, auto change) {
      LowLatencyCombineArguments bad = good;
      change(bad);
      require_throws<InvalidArgument>([&] { buffer.low_latency_combine(bad, rank.call()); }, words, words.front());
    };
    using A = LowLatencyCombineArguments;
    refused({"overlap needs return_recv_hook"}, [](A& a) { a.return_recv_hook = false; });
    refused({"overlap.signal_rows", "-1"}, [](A& a) { a.overlap->signal_rows = -1; });
    refused({"overlap.expected", "0"}, [](A& a) { a.overlap->expected = 0; });
    refused({"overlap.num_sms", "-2"}, [](A& a) { a.overlap->num_sms = -2; });
    refused({"overlap.signals", "int32"}, [](A& a) { a.overlap->signals->dtype = DType::float32; });
    refused({"overlap.signals has 6 elements, 2 local experts with 8 rows each need 8"},
            [](A& a) { a.overlap->signal_rows = 2; });
    buffer.destroy();

    BufferOptions masking = low_latency_options(2, 4, 256);
    masking.low_latency.masking = true;
    Buffer& masked = rank.buffer(masking);
    require_throws<Unsupported>([&] { masked.low_latency_combine(good, rank.call()); }, {"overlap", "masking"},
                                "a buffer with masking");
    masked.destroy();
  });
}

}  // namespace
}  // namespace deep_ep::test
