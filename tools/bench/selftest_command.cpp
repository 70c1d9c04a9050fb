// `deep_ep bench selftest`: does this installation do what it is for? Small cases of every kind, compared with the
// oracle.
#include <sys/mman.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csrc/bootstrap/buffer_exchanges.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/unique_fd.hpp"
#include "csrc/topology/system_root.hpp"
#include "tools/bench/benchmark.hpp"
#include "tools/bench/low_latency_rank.hpp"
#include "tools/bench/normal_mode_rank.hpp"
#include "tools/common/child.hpp"
#include "tools/common/command_line.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

constexpr double kSecondsOfProcesses = 120;  // to end

/// Lines as DeepEP's tests print them: "[testing] Running with BF16, with top-k (...) ... passed"
void print(const std::string& line) {
  fmt::print("[testing] {}\n", line);
  std::fflush(stdout);
}

struct SelftestStage {
  std::string name;  ///< "one rank", "two ranks", "two nodes", "two processes"
  const char* verdict = "PASS";
  int cases = 0;        ///< that are right
  std::string found{};  ///< of a failure: what was wrong; of what was left out: why
  double seconds = 0;

  void measure(const std::function<void()>& work) {
    const auto begin = std::chrono::steady_clock::now();
    try {
      work();
    } catch (const std::exception& error) {
      verdict = "FAIL";
      found = error.what();
    }
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  bool passed() const { return verdict == std::string_view("PASS"); }
  std::string text() const {
    return passed() ? fmt::format("PASS {}: {} cases are right, {:.1f} s", name, cases, seconds)
                    : fmt::format("{} {}: {}", verdict, name, found);
  }
};

void run_cases(const RankTask& task, SelftestStage& stage) {
  const auto run_case = [&](const std::string& name, const std::function<void()>& work) {
    try {
      BufferExchanges exchanges(task.bootstrap);
      exchanges.agree("it", [&] {
        work();
        exchanges.barrier();
      });
    } catch (const std::exception& error) {
      if (task.rank() == 0) print(fmt::format("{} ... FAILED: {}", name, error.what()));
      fail<Error>("{}: {}", name, error.what());
    }
    if (task.rank() != 0) return;
    print(fmt::format("{} ... passed", name));
    ++stage.cases;
  };
  NormalModeRank normal(task);
  for (const NormalModeCall& one : selftest_cases(task.shape.nodes)) {
    run_case(name_of(one), [&] { run_selftest_case(normal, one); });
  }
  normal.destroy();

  BufferOptions options;
  if (task.shape.nodes > 1) options.ranks_per_node = task.shape.ranks_per_node();
  LowLatencyRank low_latency(task, options);
  const auto finish = [&](const auto& result, bool hook) {
    if (hook) result.hook();
    task.executor->synchronize(low_latency.stream());
    low_latency.buffer().check();
  };
  low_latency.receive_for_combine();
  for (const bool hook : {false, true}) {
    const char* kind = hook ? "with" : "without";
    for (const auto format : {oracle::RowFormat::bf16, oracle::RowFormat::fp8}) {
      const char* rows = format == oracle::RowFormat::fp8 ? "FP8" : "BF16";
      run_case(fmt::format("Low-latency dispatch {}, {} hook", rows, kind), [&] {
        const LowLatencyDispatchResult result = low_latency.dispatch(format, hook);
        finish(result, hook);
        low_latency.check_dispatched(format, result);
      });
    }
    run_case(fmt::format("Low-latency combine, {} hook", kind), [&] {
      const LowLatencyCombineResult result = low_latency.combine(hook);
      finish(result, hook);
      low_latency.check_combined(result);
    });
  }
  low_latency.destroy();
}

/// All cases on the ranks of `world`. Collective. `nodes`: that they play.
SelftestStage run_stage(const std::string& name, const World& world, int nodes, Device::Kind device) {
  SelftestStage stage{.name = name};
  stage.measure([&] {
    const WorkloadShape shape{
        .ranks = world.size(), .tokens = 13, .hidden = 256, .topk = 4, .experts = 8 * world.size(), .nodes = nodes};
    run_workloads(
        world, device, {shape}, [&](const RankTask& task) { run_cases(task, stage); }, true);
  });
  return stage;
}

SelftestStage run_processes(Device::Kind device) {
  SelftestStage stage{.name = "two processes"};
  stage.measure([&] {
    const Place here{.port = free_master_port()};
    const UniqueFd printed(::memfd_create("printed", MFD_CLOEXEC)), errors(::memfd_create("errors", MFD_CLOEXEC));
    if (!printed || !errors) fail<SystemError>("memfd_create: {}", errno_text(errno));
    const auto text_of = [](const UniqueFd& file) {
      return topology::SystemRoot().text(fmt::format("/proc/self/fd/{}", file.get()));
    };
    const std::vector<std::string> command = {own_program(), "bench", "selftest", "--device", name_of(device)};
    std::vector<ChildCommand> commands;
    for (const int rank : {0, 1}) {
      commands.push_back({.words = command_of_rank(here, rank, 2, command),
                          .output = printed.get(),  // of rank 0 alone: the other one prints nothing there
                          .errors = errors.get()});
    }
    Children children(commands);
    const Deadline deadline(kSecondsOfProcesses);
    while (children.running() > 0 && !children.first_failure() && !deadline.expired()) children.step();
    constexpr std::string_view kPassed = "... passed";
    const std::string output = text_of(printed);
    for (auto at = output.find(kPassed); at != std::string::npos; at = output.find(kPassed, at + 1)) ++stage.cases;
    if (const auto failed = children.first_failure()) {
      fail<Error>("rank {} ended with {}: {}", *failed, describe_status(*children.status(*failed)), text_of(errors));
    }
    if (children.running() > 0) throw Error("it took too long");
  });
  return stage;
}

/// Each stage on this process's threads, or on processes that it starts.
std::vector<SelftestStage> run_stages(const std::string& word) {
  const auto threads = [&](const char* name, int ranks, int nodes, Device::Kind device) {
    World world;
    world.bootstraps = make_thread_bootstraps(ranks);
    return run_stage(name, world, nodes, device);
  };
  std::vector<SelftestStage> stages = {threads("one rank", 1, 1, choose_device(word, 1))};
  if (word == "cuda" && cuda_device_count() < 2) {
    for (const char* name : {"two ranks", "two nodes", "two processes"}) {
      stages.push_back({.name = name, .verdict = "SKIP", .found = "this machine has one GPU"});
    }
    return stages;
  }
  const Device::Kind device = choose_device(word, 2);
  stages.push_back(threads("two ranks", 2, 1, device));
  stages.push_back(threads("two nodes", 2, 2, device));
  stages.push_back(run_processes(device));
  return stages;
}

int run_selftest(const std::string& word) {
  std::vector<SelftestStage> stages;
  bool speaks = true;
  if (World::several_processes()) {
    const World world = make_world(0, 0, word);
    const Device::Kind device = choose_device(word, world.local_ranks());
    speaks = world.first_rank() == 0;
    stages.push_back(
        run_stage(fmt::format("{} ranks ({})", world.size(), world.kind), world, std::max(1, world.nodes), device));
  } else {
    stages = run_stages(word);
  }
  const bool well =
      std::ranges::none_of(stages, [](const auto& stage) { return stage.verdict == std::string_view("FAIL"); });
  if (speaks) {
    fmt::print("\n");
    for (const SelftestStage& stage : stages) fmt::print("{}\n", stage.text());
    fmt::print("{}\n", well ? "OK: this installation works" : "FAILED: see above");
  } else if (!well) {
    fmt::print(stderr, "deep_ep: {}\n", stages.front().text());
  }
  return well ? 0 : 1;
}

}  // namespace

void add_bench_selftest(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand(
      "selftest",
      "Check that calls of every kind give the right results: one rank, two, two nodes, two processes; seconds");
  auto device = std::make_shared<std::string>("auto");
  add_device_option(*command, *device);
  command->footer("Exit status: 0 if every case is right, otherwise 1.");
  command->callback([device, &action] { action = [device] { return run_selftest(*device); }; });
}

}  // namespace deep_ep::tools
