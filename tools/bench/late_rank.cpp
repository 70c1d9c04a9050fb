#include "tools/bench/late_rank.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <span>

#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

using LateClock = std::chrono::steady_clock;

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
        bench_(shape, bootstrap, executor, reach_of(options, shape.ranks)),
        filler_(make_filler(*executor, 2)) {}

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
    PartEnds ends{};
    for (std::size_t part = 0; part < ends.size(); ++part) ends[part] = middle_of(times[part + 1]) * 1e6;
    report.ends_us = gather(ends);
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
  /// All ranks begin it at the same moment, except for one that is to be late.
  std::array<EventHandle, kStamps> run_round() {
    bootstrap_.barrier();
    if (filler_) executor_.fill(filler_->view().data, 0, filler_->view().bytes(), bench_.stream());
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
    const LowLatencyDispatchResult dispatched = bench_.dispatch(true, options_.trace);
    stamp(1);
    if (dispatched.hook) dispatched.hook();
    stamp(2);
    const LowLatencyCombineResult combined = bench_.combine(LowLatencyCombine::plain, options_.trace);
    stamp(3);
    if (combined.hook) combined.hook();
    stamp(4);
    executor_.synchronize(bench_.stream());
    return stamps;
  }

  std::vector<PartEnds> gather(const PartEnds& own) {
    const std::vector<std::byte> bytes = bootstrap_.all_gather(std::as_bytes(std::span(&own, 1)));
    std::vector<PartEnds> all(bytes.size() / sizeof(PartEnds));
    std::memcpy(all.data(), bytes.data(), bytes.size());
    return all;
  }

  const LowLatencyOptions& options_;
  Bootstrap& bootstrap_;
  Executor& executor_;
  LowLatencyBench bench_;
  std::unique_ptr<DeviceTensor> filler_;
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
    json["waits"].push_back({{"rank", stats.rank},
                             {"dispatch", times(stats.dispatch)},
                             {"combine", times(stats.combine)},
                             {"ends_us", report.ends_us[static_cast<std::size_t>(stats.rank)]}});
  }
  return json;
}

}  // namespace deep_ep::tools
