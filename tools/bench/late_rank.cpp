#include "tools/bench/late_rank.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <optional>
#include <span>

#include "bench_support/low_latency_rank.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

using LateClock = std::chrono::steady_clock;

/// Filling this takes a GPU longer than the host needs to enqueue a round.
constexpr std::size_t kLateFillerBytes = std::size_t{512} << 20;
constexpr std::size_t kStamps = 5;

double middle_of(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// One rank's part.
class LateRankFinder {
 public:
  LateRankFinder(const LowLatencyOptions& options, const WorkloadShape& shape,
                 const std::shared_ptr<Bootstrap>& bootstrap, const std::shared_ptr<Executor>& executor)
      : options_(options),
        bootstrap_(*bootstrap),
        executor_(*executor),
        bench_(shape, bootstrap, executor,
               {.ranks_per_node = options.nodes == 0 ? 0 : shape.ranks / options.nodes,
                .nvlink = options.nvlink,
                .rails = rails_of(options.rails)}) {
    if (executor_.device().kind != Device::Kind::cuda) return;
    filler_.emplace(executor_, DType::uint8, std::initializer_list<std::int64_t>{kLateFillerBytes});
  }

  LateRankReport run(std::int64_t tokens) {
    bench_.receive_for_combine();
    bench_.buffer().low_latency_stats(LowLatencyStatsThen::go_on, bench_.stream());
    std::array<std::vector<double>, kStamps> times;
    for (int round = -options_.rounds.warmup; round < options_.rounds.count; ++round) {
      if (round == 0) bench_.buffer().low_latency_stats(LowLatencyStatsThen::reset, bench_.stream());
      const std::array<EventHandle, kStamps> stamps = run_round();
      if (round < 0) continue;
      for (std::size_t i = 1; i < kStamps; ++i) times[i].push_back(executor_.elapsed_seconds(stamps[0], stamps[i]));
    }
    bench_.buffer().check();
    const LowLatencyStats own = bench_.buffer().low_latency_stats(LowLatencyStatsThen::stop, bench_.stream());
    LateRankReport report;
    report.tokens = tokens;
    report.stats = gather_low_latency_stats(bootstrap_, own);
    report.timelines = gather({.dispatch_sent = middle_of(times[1]),
                               .dispatched = middle_of(times[2]),
                               .combine_sent = middle_of(times[3]),
                               .combined = middle_of(times[4])});
    report.verdict = find_late_ranks(report.stats, options_.late_threshold_us.value_or(kLateRankThresholdUs));
    if (!options_.late_threshold_us && executor_.device().kind == Device::Kind::cpu) {
      report.verdict.late.clear();
      report.verdict.text =
          "no verdict: on the CPU a rank waits until the system runs the others, however healthy they are "
          "(--late-threshold US says what would be late)";
    }
    bench_.destroy();
    return report;
  }

 private:
  static LowLatencyRails rails_of(const std::string& word) {
    if (word == "always") return LowLatencyRails::always;
    return word == "never" ? LowLatencyRails::never : LowLatencyRails::automatic;
  }

  bool in_parts() const { return !options_.trace.empty(); }

  /// All ranks begin it at the same moment, except for one that is to be late.
  std::array<EventHandle, kStamps> run_round() {
    bootstrap_.barrier();
    if (filler_) executor_.fill(filler_->view().data, 0, kLateFillerBytes, bench_.stream());
    bench_.buffer().low_latency_clean(bench_.stream());  // a barrier of the devices
    if (options_.late_us > 0 && bootstrap_.rank() == options_.late_rank) {
      executor_.synchronize(bench_.stream());
      const auto until = LateClock::now() + std::chrono::duration<double, std::micro>(options_.late_us);
      while (LateClock::now() < until) {
      }
    }
    std::array<EventHandle, kStamps> stamps;
    const auto stamp = [&](std::size_t i) { stamps[i] = executor_.record_timed_event(bench_.stream()); };
    stamp(0);
    const LowLatencyDispatchResult dispatched = bench_.dispatch(true, in_parts());
    stamp(1);
    if (dispatched.hook) dispatched.hook();
    stamp(2);
    const LowLatencyCombineResult combined = bench_.combine(LowLatencyCombine::plain, in_parts());
    stamp(3);
    if (combined.hook) combined.hook();
    stamp(4);
    executor_.synchronize(bench_.stream());
    return stamps;
  }

  std::vector<RankTimeline> gather(const RankTimeline& own) {
    const std::vector<std::byte> bytes = bootstrap_.all_gather(std::as_bytes(std::span(&own, 1)));
    std::vector<RankTimeline> all(bytes.size() / sizeof(RankTimeline));
    std::memcpy(all.data(), bytes.data(), bytes.size());
    return all;
  }

  const LowLatencyOptions& options_;
  Bootstrap& bootstrap_;
  Executor& executor_;
  LowLatencyBench bench_;
  std::optional<DeviceTensor> filler_;
};

/// What all other ranks have waited for `source`, as `wait` says of each.
template <class Wait>
std::vector<double> waits_for(const LateRankReport& report, int source, const Wait& wait) {
  std::vector<double> waits;
  for (const LowLatencyStats& stats : report.stats) {
    if (stats.rank != source) waits.push_back(wait(stats));
  }
  return waits;
}

}  // namespace

void find_late_rank(const LowLatencyOptions& options, const World& world, Device::Kind device,
                    const std::function<void(const LateRankReport&)>& report) {
  std::vector<WorkloadShape> shapes;
  for (const std::int64_t tokens : options.tokens) {
    shapes.push_back({world.size, tokens, options.hidden, options.topk, options.experts});
  }
  run_workloads(world, device, shapes,
                [&](const WorkloadShape& shape, const Routes&, const std::shared_ptr<Bootstrap>& bootstrap,
                    const std::shared_ptr<Executor>& executor) {
                  const LateRankReport found = LateRankFinder(options, shape, bootstrap, executor).run(shape.tokens);
                  if (bootstrap->rank() == 0) report(found);
                });
}

void print_late_rank(const LateRankReport& report) {
  clear_progress();
  constexpr const char* kLine = "{:>7}{:>8}{:>13}{:>13}{:>13}{:>13}  {}\n";
  fmt::print(kLine, "tokens", "source", "dispatch us", "combine us", "together us", "longest us", "of rank");
  const int ranks = static_cast<int>(report.stats.size());
  for (int source = 0; source < ranks; ++source) {
    double longest = 0;
    int waiter = -1;
    for (const LowLatencyStats& stats : report.stats) {
      if (stats.rank == source) continue;
      const auto at = static_cast<std::size_t>(source);
      const double one = std::max(stats.dispatch.longest_us[at], stats.combine.longest_us[at]);
      if (waiter >= 0 && one <= longest) continue;
      longest = one;
      waiter = stats.rank;
    }
    const auto show = [](double us) { return fmt::format("{:.1f}", us); };
    const auto typical = [&](const LowLatencyWaitTimes LowLatencyStats::*kind) {
      return show(
          middle_of(waits_for(report, source, [&](const LowLatencyStats& s) { return (s.*kind).mean_us(source); })));
    };
    fmt::print(kLine, report.tokens, source, typical(&LowLatencyStats::dispatch), typical(&LowLatencyStats::combine),
               show(report.verdict.waited_us[static_cast<std::size_t>(source)]), show(longest),
               waiter < 0 ? std::string("-") : std::to_string(waiter));
  }
  fmt::print("{}\n\n", report.verdict.text);
  std::fflush(stdout);
}

nlohmann::json late_rank_json(const LateRankReport& report) {
  nlohmann::json json = {{"tokens", report.tokens},
                         {"late", report.verdict.late},
                         {"verdict", report.verdict.text},
                         {"waited_us", report.verdict.waited_us}};
  for (const LowLatencyStats& stats : report.stats) {
    const auto times = [](const LowLatencyWaitTimes& of) {
      return nlohmann::json{{"calls", of.calls}, {"total_us", of.total_us}, {"longest_us", of.longest_us}};
    };
    json["waits"].push_back(
        {{"rank", stats.rank}, {"dispatch", times(stats.dispatch)}, {"combine", times(stats.combine)}});
  }
  return json;
}

}  // namespace deep_ep::tools
