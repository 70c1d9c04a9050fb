// `deep_ep bench selftest`: does this installation do what it is for?
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "tools/bench/commands.hpp"
#include "tools/bench/selftest.hpp"
#include "tools/common/command_line.hpp"
#include "tools/common/json_output.hpp"
#include "tools/common/ranks.hpp"
#include "tools/common/version.hpp"

namespace deep_ep::tools {
namespace {

struct SelftestCommand {
  SelftestOptions test;
  bool quick = false;
  bool json = false;
};

int run_selftest_command(const SelftestCommand& command) {
  const SelftestPrinter print = [&](const std::string& line) {
    if (command.json) return;
    fmt::print("{}\n", line);
    std::fflush(stdout);
  };
  int nodes = 1;
  const bool is_one_of_several = World::several_processes();
  std::vector<SelftestStage> stages;
  bool speaks = true;
  if (is_one_of_several) {
    const World world = make_world(0, 0, command.test.device);
    const Device::Kind device = choose_device(command.test.device, world.local_ranks());
    if (world.nodes != 0) nodes = world.nodes;
    speaks = world.first_rank == 0;
    stages.push_back(
        run_selftest_stage(fmt::format("{} ranks ({})", world.size, world.kind), world, nodes, device, print));
  } else {
    stages = run_selftest(command.test, print);
  }
  const bool well =
      std::ranges::none_of(stages, [](const SelftestStage& stage) { return stage.outcome == SelftestOutcome::fail; });
  if (speaks && command.json) {
    nlohmann::json document = {{"version", full_version()}, {"well", well}, {"stages", nlohmann::json::array()}};
    for (const SelftestStage& stage : stages) document["stages"].push_back(stage.json());
    print_json(document);
  } else if (speaks) {
    fmt::print("\n");
    for (const SelftestStage& stage : stages) fmt::print("{}\n", stage.text());
    fmt::print("{}\n", well ? "OK: this installation works" : "FAILED: see above");
  }
  if (!well && !speaks) fmt::print(stderr, "deep_ep: {}\n", stages.front().text());
  return well ? 0 : 1;
}

}  // namespace

void add_bench_selftest(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand(
      "selftest",
      "Check that calls of every kind give the right results: one rank, two, two nodes, two processes; seconds");
  auto options = std::make_shared<SelftestCommand>();
  add_device_option(*command, options->test.device);
  command->add_option("--seconds", options->test.seconds, "How long the stage of two processes may take")
      ->check(CLI::Range(0.01, 3600.0))
      ->capture_default_str();
  command->add_flag("--quick", options->quick, "As it is anyway; for scripts that give it to every benchmark");
  command->add_flag("--json", options->json, "Print JSON");
  command->footer("Exit status: 0 if every case is right, otherwise 1.");
  command->callback([options, &action] { action = [options] { return run_selftest_command(*options); }; });
}

}  // namespace deep_ep::tools
