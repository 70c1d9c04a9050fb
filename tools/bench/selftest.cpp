#include "tools/bench/selftest.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <memory>

#include "bench_support/low_latency_rank.hpp"
#include "deep_ep/error.hpp"
#include "tools/bench/check.hpp"
#include "tools/bench/selftest_rank.hpp"
#include "tools/common/child.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

WorkloadShape small_shape(int ranks, int nodes) {
  return {.ranks = ranks,
          .tokens = 13,
          .hidden = 256,
          .topk = 4,
          .experts = 8 * ranks,
          .window_bytes = 0,
          .nodes = nodes,
          .groups = 0};
}

/// How a case went on one rank; all-gathered.
struct CaseVerdict {
  bool failed = false;
  std::array<char, 300> reason{};
};

/// Runs `work` on this rank; throws on all ranks what one of them throws.
void together(Bootstrap& bootstrap, const std::function<void()>& work) {
  CaseVerdict mine;
  try {
    work();
  } catch (const std::exception& error) {
    mine.failed = true;
    std::string_view(error.what()).copy(mine.reason.data(), mine.reason.size() - 1);
  }
  const std::vector<std::byte> bytes = bootstrap.all_gather(std::as_bytes(std::span(&mine, 1)));
  std::vector<CaseVerdict> all(bytes.size() / sizeof(CaseVerdict));
  std::memcpy(static_cast<void*>(all.data()), bytes.data(), bytes.size());
  for (const CaseVerdict& one : all) {
    if (one.failed) throw Error(one.reason.data());
  }
}

class StageRank {
 public:
  StageRank(const WorkloadShape& shape, const Routes& routes, const SelftestTruth& truth, SelftestStage& stage,
            const SelftestPrinter& print)
      : shape_(shape), routes_(routes), truth_(truth), stage_(stage), print_(print) {}

  void run(const std::shared_ptr<Bootstrap>& bootstrap, const std::shared_ptr<Executor>& executor) {
    SelftestRank normal(shape_, truth_, bootstrap, executor);
    for (const SelftestCase& one : selftest_cases(shape_.nodes)) {
      run_case(*bootstrap, one.name(), [&] { normal.run(one); });
    }
    normal.destroy();
    run_low_latency_cases(bootstrap, executor);
  }

 private:
  void run_case(Bootstrap& bootstrap, const std::string& name, const std::function<void()>& work) {
    const bool speaks = bootstrap.rank() == 0;
    try {
      together(bootstrap, work);
    } catch (const std::exception& error) {
      if (speaks) print_(fmt::format("[testing] {} ... FAILED: {}", name, error.what()));
      throw Error(fmt::format("{}: {}", name, error.what()));
    }
    if (!speaks) return;
    print_(fmt::format("[testing] {} ... passed", name));
    ++stage_.cases;
  }

  void run_low_latency_cases(const std::shared_ptr<Bootstrap>& bootstrap, const std::shared_ptr<Executor>& executor) {
    const LowLatencyReach reach{.ranks_per_node = shape_.nodes > 1 ? shape_.ranks_per_node() : 0};
    LowLatencyBench bench(shape_, bootstrap, executor, reach);
    const CheckedRank rank{*executor, bench.stream(), shape_, routes_, bootstrap->rank()};
    bench.receive_for_combine();
    for (const bool hook : {false, true}) {
      const char* kind = hook ? "with" : "without";
      for (const bool fp8 : {false, true}) {
        run_case(*bootstrap, fmt::format("Low-latency dispatch {}, {} hook", fp8 ? "FP8" : "BF16", kind), [&] {
          const LowLatencyDispatchResult result = bench.dispatch(fp8, hook);
          if (hook) result.hook();
          executor->synchronize(bench.stream());
          bench.buffer().check();
          check_low_latency_dispatch(rank, fp8 ? oracle::RowFormat::fp8 : oracle::RowFormat::bf16, result);
        });
      }
      run_case(*bootstrap, fmt::format("Low-latency combine, {} hook", kind), [&] {
        const LowLatencyCombineResult result = bench.combine(LowLatencyCombine::plain, hook);
        if (hook) result.hook();
        executor->synchronize(bench.stream());
        bench.buffer().check();
        check_low_latency_combine(rank, LowLatencyCombine::plain, reach, result);
      });
    }
    bench.destroy();
  }

  const WorkloadShape& shape_;
  const Routes& routes_;
  const SelftestTruth& truth_;
  SelftestStage& stage_;  ///< written by rank 0 alone
  const SelftestPrinter& print_;
};

World threads(int ranks) {
  World world;
  world.kind = "threads";
  world.size = ranks;
  world.bootstraps = make_thread_bootstraps(ranks);
  return world;
}

SelftestStage run_processes(const SelftestOptions& options, Device::Kind device) {
  SelftestStage stage{.name = "two processes"};
  const auto begin = Clock::now();
  const Place here{.port = free_port()};
  std::vector<ChildCommand> commands;
  for (const int rank : {0, 1}) {
    commands.push_back({.words = {own_program(), "bench", "selftest", "--device", name_of(device)},
                        .variables = variables_of_rank(here, rank, 2)});
  }
  const std::vector<ChildResult> results = run_children(commands, options.seconds);
  stage.seconds = seconds_since(begin);
  constexpr std::string_view kPassed = "... passed";
  const std::string& output = results.front().output;
  for (std::size_t at = output.find(kPassed); at != std::string::npos; at = output.find(kPassed, at + 1)) ++stage.cases;
  const auto failed = std::ranges::find_if(results, [](const ChildResult& one) { return !one.well(); });
  if (failed == results.end()) return stage;
  stage.outcome = SelftestOutcome::fail;
  stage.found = failed->reason();
  return stage;
}

}  // namespace

std::string SelftestStage::text() const {
  switch (outcome) {
    case SelftestOutcome::pass:
      return fmt::format("PASS {}: {} cases are right, {:.1f} s", name, cases, seconds);
    case SelftestOutcome::skip:
      return fmt::format("SKIP {}: {}", name, found);
    case SelftestOutcome::fail:
      break;
  }
  return fmt::format("FAIL {}: {}", name, found);
}

nlohmann::json SelftestStage::json() const {
  constexpr std::array kWords = {"PASS", "SKIP", "FAIL"};
  return {{"stage", name},
          {"verdict", kWords[static_cast<std::size_t>(outcome)]},
          {"cases", cases},
          {"seconds", seconds},
          {"found", found}};
}

SelftestStage run_selftest_stage(const std::string& name, const World& world, int nodes, Device::Kind device,
                                 const SelftestPrinter& print) {
  SelftestStage stage{.name = name};
  const auto begin = Clock::now();
  try {
    const WorkloadShape shape = small_shape(world.size, nodes);
    const SelftestTruth truth(shape);
    run_workloads(world, device, {shape},
                  [&](const WorkloadShape& same_shape, const Routes& routes,
                      const std::shared_ptr<Bootstrap>& bootstrap, const std::shared_ptr<Executor>& executor) {
                    StageRank(same_shape, routes, truth, stage, print).run(bootstrap, executor);
                  });
  } catch (const std::exception& error) {
    stage.outcome = SelftestOutcome::fail;
    stage.found = error.what();
  }
  stage.seconds = seconds_since(begin);
  return stage;
}

std::vector<SelftestStage> run_selftest(const SelftestOptions& options, const SelftestPrinter& print) {
  std::vector<SelftestStage> stages;
  stages.push_back(run_selftest_stage("one rank", threads(1), 1, choose_device(options.device, 1), print));
  if (options.device == "cuda" && cuda_device_count() < 2) {
    for (const char* name : {"two ranks", "two nodes", "two processes"}) {
      stages.push_back({.name = name, .outcome = SelftestOutcome::skip, .found = "this machine has one GPU"});
    }
    return stages;
  }
  const Device::Kind device = choose_device(options.device, 2);
  stages.push_back(run_selftest_stage("two ranks", threads(2), 1, device, print));
  stages.push_back(run_selftest_stage("two nodes", threads(2), 2, device, print));
  stages.push_back(run_processes(options, device));
  return stages;
}

}  // namespace deep_ep::tools
