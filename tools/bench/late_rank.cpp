// `deep_ep bench low-latency --who-is-late`: calls with statistics of waits.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "csrc/bootstrap/agreement.hpp"
#include "deep_ep/low_latency_stats.hpp"
#include "tools/bench/low_latency.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

/// The results for one number of tokens, by rank.
struct LateRankReport {
  std::int64_t tokens = 0;
  std::vector<LowLatencyStats> stats;
  LowLatencyVerdict verdict;
};

double middle_of(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// One rank's part.
class LateRankFinder {
 public:
  LateRankFinder(const LowLatencyBenchOptions& options, const RankTask& task)
      : options_(options),
        task_(task),
        executor_(*task.executor),
        rank_(task, options.buffer(task.shape.ranks)),
        filler_(make_filler(executor_, 2)) {}

  LateRankReport run() {
    Buffer& buffer = rank_.buffer();
    rank_.receive_for_combine();
    buffer.low_latency_stats(LowLatencyStatsThen::go_on, rank_.stream());
    for (int round = -options_.rounds.warmup; round < options_.rounds.count; ++round) {
      if (round == 0) buffer.low_latency_stats(LowLatencyStatsThen::reset, rank_.stream());
      run_round();
    }
    buffer.check();
    const LowLatencyStats own = buffer.low_latency_stats(LowLatencyStatsThen::stop, rank_.stream());
    LateRankReport report{task_.shape.tokens, gather_low_latency_stats(*task_.bootstrap, own), {}};
    report.verdict = find_late_ranks(report.stats, options_.late_threshold_us.value_or(kLateRankThresholdUs));
    if (!options_.late_threshold_us && executor_.device().kind == Device::Kind::cpu) {
      report.verdict.late.clear();
      report.verdict.text =
          "no verdict: on the CPU a rank waits until the system runs the others, however healthy they are "
          "(--late-threshold US says what would be late)";
    }
    rank_.destroy();
    return report;
  }

 private:
  /// All ranks begin it at the same moment, except for one that is to be late.
  void run_round() {
    task_.bootstrap->barrier();
    if (filler_) executor_.fill(filler_->view().data, 0, filler_->view().bytes(), rank_.stream());
    rank_.buffer().low_latency_clean(rank_.stream());  // a barrier of the devices
    if (options_.late_us > 0 && task_.rank() == options_.late_rank) {
      executor_.synchronize(rank_.stream());
      using Clock = std::chrono::steady_clock;
      const auto until = Clock::now() + std::chrono::duration<double, std::micro>(options_.late_us);
      while (Clock::now() < until) {
      }
    }
    rank_.dispatch(oracle::RowFormat::fp8);
    rank_.combine(LowLatencyCombine::plain);
    executor_.synchronize(rank_.stream());
  }

  const LowLatencyBenchOptions& options_;
  const RankTask& task_;
  Executor& executor_;
  LowLatencyRank rank_;
  std::unique_ptr<DeviceTensor> filler_;
};

/// A table for people: a line for each source.
void print(const LateRankReport& report) {
  clear_progress();
  constexpr const char* kLine = "{:>7}{:>8}{:>13}{:>13}{:>13}{:>13}  {}\n";
  fmt::print(kLine, "tokens", "source", "dispatch us", "combine us", "together us", "longest us", "of rank");
  const auto show = [](double us) { return fmt::format("{:.1f}", us); };
  for (std::size_t source = 0; source < report.stats.size(); ++source) {
    double longest = 0;
    std::string waiter = "-";
    std::vector<double> dispatch, combine;  // what each of the others has waited
    for (const LowLatencyStats& stats : report.stats) {
      if (stats.rank == static_cast<int>(source)) continue;
      dispatch.push_back(stats.dispatch.mean_us(static_cast<int>(source)));
      combine.push_back(stats.combine.mean_us(static_cast<int>(source)));
      const double one = std::max(stats.dispatch.longest_us[source], stats.combine.longest_us[source]);
      if (waiter != "-" && one <= longest) continue;
      longest = one;
      waiter = std::to_string(stats.rank);
    }
    fmt::print(kLine, report.tokens, source, show(middle_of(dispatch)), show(middle_of(combine)),
               show(report.verdict.waited_us[source]), show(longest), waiter);
  }
  fmt::print("{}\n\n", report.verdict.text);
  std::fflush(stdout);
}

}  // namespace

int run_late_rank(const LowLatencyBenchOptions& options, BenchRun& run) {
  if (run.speaks) {
    fmt::print(
        "{}What a rank waits for each source, on average over {} rounds: the median of the other ranks.\n"
        "longest: one wait in one call, and of which rank.\n\n",
        run.text, options.rounds.count);
  }
  run.measure([&](const RankTask& task) {
    const LateRankReport report = LateRankFinder(options, task).run();
    if (task.rank() == 0) print(report);
  });
  return 0;
}

}  // namespace deep_ep::tools
