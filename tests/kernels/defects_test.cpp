// Can the host machine find mistakes? Every kernel of defects/ must be caught with its mistake, by a wrong result, a
// reported error or (where nothing else can see it) a report of ThreadSanitizer, and be clean without it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>

#include "deep_ep/error.hpp"
#include "tests/kernels/defects/defects.hpp"
#include "tests/kernels/test_kernel.hpp"

namespace deep_ep::test {
namespace {

using defects::kRows;
using defects::kRowWords;
using defects::Params;

constexpr int kCleanSeeds = DEEP_EP_TSAN ? 40 : 500;
constexpr int kSeeds = 100;  ///< schedules in which a mistake must be caught at least once

enum class Kind { signal, rows, partner, counter };  ///< what the kernel computes

struct Case {
  const char* name;
  TestKernel<Params> kernel;
  Kind kind;
  int partner = 0;              ///< distance to the partner (Kind::partner); 0: the mirrored lane
  bool only_sanitizer = false;  ///< x86 itself hides it
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class Data {
 public:
  explicit Data(Executor& executor)
      : executor_(executor),
        signal_(executor, 2),
        source_(executor, kWords),
        destination_(executor, kWords),
        result_(executor, 128) {
    for (std::size_t i = 0; i < kWords; ++i) {
      const auto v = static_cast<std::uint32_t>(i);
      source_[i] = {{10000 + v, 20000 + v, 30000 + v, 40000 + v}};
    }
  }

  /// Runs the kernel; returns what was wrong, empty if nothing.
  std::string run(const Case& c, StreamHandle stream, bool planted) {
    const int calls = c.kind == Kind::signal ? 3 : 1;
    for (int call = 1; call <= calls; ++call) {
      const Params params{
          planted,       static_cast<std::uint64_t>(call), signal_.data(), source_.data(), destination_.data(),
          result_.data()};
      const int threads = c.kind == Kind::signal || c.kind == Kind::rows ? 32 : 128;
      c.kernel(executor_, stream, {c.kind == Kind::signal ? 2 : 1, threads, defects::kSharedBytes}, params);
      try {
        executor_.synchronize(stream);
      } catch (const Error& e) {
        return e.what();
      }
      if (std::string wrong = check(c, call); !wrong.empty()) return wrong;
    }
    return {};
  }

 private:
  static constexpr std::size_t kWords = kRows * kRowWords;

  std::string check(const Case& c, int call) const {
    const auto differ = [](const char* what, std::size_t i, std::uint32_t got, std::uint32_t want) {
      return std::string(what) + " " + std::to_string(i) + ": " + std::to_string(got) + ", not " + std::to_string(want);
    };
    const std::string name = c.name;
    const bool adds_epoch = name == "WrongEpoch" || name == "FlagWithoutEpoch";
    if (c.kind == Kind::rows) {
      for (std::size_t i = 0; i < kWords; ++i) {
        for (int w = 0; w < 4; ++w) {
          if (destination_[i].word[w] != source_[i].word[w]) {
            return differ("row word", i, destination_[i].word[w], source_[i].word[w]);
          }
        }
      }
      return {};
    }
    for (std::size_t t = 0; t < (c.kind == Kind::signal ? 32u : 128u); ++t) {
      std::uint32_t want = 128;  // Kind::counter
      if (c.kind == Kind::signal) want = source_[t].word[0] + (adds_epoch ? static_cast<std::uint32_t>(call) : 0);
      if (c.kind == Kind::partner) {
        want = 1000 +
               static_cast<std::uint32_t>(c.partner == 0 ? t ^ 31 : (t + static_cast<std::size_t>(c.partner)) % 128);
      }
      if (result_[t] != want) return differ("result of thread", t, result_[t], want);
    }
    return {};
  }

  Executor& executor_;
  Shared<std::uint64_t> signal_;
  Shared<device::Vec16> source_;
  Shared<device::Vec16> destination_;
  Shared<std::uint32_t> result_;
};

std::string run(Executor& executor, const Case& c, bool planted) {
  Data data(executor);
  const StreamHandle stream = executor.create_stream();
  std::string wrong = data.run(c, stream, planted);
  executor.destroy_stream(stream);
  return wrong;
}

/// How the mistake was found, under any schedule; empty if under none.
std::string hunt(const Case& c) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    const auto executor = make_host_executor({.seed = static_cast<std::uint64_t>(seed)});
    if (std::string found = run(*executor, c, /*planted=*/true); !found.empty()) {
      return "seed " + std::to_string(seed) + ": " + found;
    }
  }
  return {};
}

class Defects : public testing::TestWithParam<Case> {};

TEST_P(Defects, PlantedIsCaught) {
  const Case& c = GetParam();
#if DEEP_EP_TSAN
  // In a process of its own: there a report is what we want, and it changes the exit status.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto caught = [](int status) { return !(WIFEXITED(status) && WEXITSTATUS(status) == 0); };
  EXPECT_EXIT(
      {
        const std::string found = hunt(c);
        std::cerr << found << std::endl;
        std::exit(found.empty() ? 0 : 3);
      },
      caught, c.only_sanitizer ? "ThreadSanitizer: data race" : "");
#else
  if (c.only_sanitizer) GTEST_SKIP() << "only ThreadSanitizer can see this one: x86 keeps the order of stores";
  const std::string found = hunt(c);
  EXPECT_NE(found, "") << "not caught under " << kSeeds << " schedules";
  RecordProperty("found", found);
#endif
}

TEST_P(Defects, TwinIsClean) {
  for (int seed = 0; seed < kCleanSeeds; ++seed) {
    const auto executor = make_host_executor({.seed = static_cast<std::uint64_t>(seed)});
    ASSERT_EQ(run(*executor, GetParam(), /*planted=*/false), "") << "seed " << seed;
  }
}

TEST_P(Defects, TwinIsCleanOnEveryExecutor) {
  for (const auto& executor : executors_present()) {
    EXPECT_EQ(run(*executor, GetParam(), /*planted=*/false), "") << to_string(executor->device());
  }
}

#define CASE(name, kernel, ...) \
  Case { name, TestKernel<Params>(DEEP_EP_TEST_LAUNCHERS(kernel)), __VA_ARGS__ }

INSTANTIATE_TEST_SUITE_P(All, Defects,
                         testing::Values(CASE("RelaxedFlag", defect_relaxed_flag, Kind::signal, 0, true),
                                         CASE("SignalBeforeCompletion", defect_signal_before_completion, Kind::signal),
                                         CASE("LoadWithoutFence", defect_load_without_fence, Kind::signal),
                                         CASE("WrongEpoch", defect_wrong_epoch, Kind::signal),
                                         CASE("SignalWithoutWarpSync", defect_signal_without_warp_sync, Kind::signal),
                                         CASE("FlagWithoutEpoch", defect_flag_without_epoch, Kind::signal),
                                         CASE("CreditIgnored", defect_credit_ignored, Kind::signal),
                                         CASE("CreditWithoutFence", defect_credit_without_fence, Kind::signal),
                                         CASE("SignalWithoutFence", defect_signal_without_fence, Kind::signal),
                                         CASE("StageReused", defect_stage_reused, Kind::rows),
                                         CASE("MissingPublish", defect_missing_publish, Kind::rows),
                                         CASE("ExitWithoutWait", defect_exit_without_wait, Kind::rows),
                                         CASE("ParityNotFlipped", defect_parity_not_flipped, Kind::rows),
                                         CASE("WrongBytes", defect_wrong_bytes, Kind::rows),
                                         CASE("LoadIntoStageInUse", defect_load_into_stage_in_use, Kind::rows),
                                         CASE("MissingWarpSync", defect_missing_warp_sync, Kind::partner),
                                         CASE("MissingBlockSync", defect_missing_block_sync, Kind::partner, 32),
                                         CASE("UninitialisedShared", defect_uninitialised_shared, Kind::counter)),
                         [](const testing::TestParamInfo<Case>& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace deep_ep::test
