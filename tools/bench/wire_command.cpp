// `deep_ep bench wire`: the NICs by themselves.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "csrc/support/environment.hpp"
#include "deep_ep/error.hpp"
#include "tools/bench/commands.hpp"
#include "tools/bench/output/report.hpp"
#include "tools/bench/wire.hpp"
#include "tools/common/command_line.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

struct WireCommand {
  WireOptions wire;
  OutputOptions output;
  bool quick = false;
};

constexpr const char* kWireLine = "{:<16}{:<20}{:<15}{:>10}{:>10}{:>9}{:>12}\n";

void print_wire_line(const Figure& m) {
  const auto show = [](const Figure::Number& number, const char* format) {
    return number ? fmt::format(fmt::runtime(format), *number) : "-";
  };
  const bool has_share = m.gb_per_s && m.nominal_gb_per_s;
  clear_progress();
  fmt::print(kWireLine, m.nic, m.operation, m.mode, show(m.mean_us, "{:.2f}"), show(m.gb_per_s, "{:.4g}"),
             show(m.nominal_gb_per_s, "{:.4g}"),
             has_share ? fmt::format("{:.1f} %", *m.gb_per_s / *m.nominal_gb_per_s * 100) : "-");
  std::fflush(stdout);
}

int run_wire_command(WireCommand command) {
  constexpr double kQuick = 0.05;
  if (command.quick) command.wire.seconds = kQuick;
  if (command.wire.nics == std::vector<std::string>{"all"}) command.wire.nics.clear();
  const Patient patient = examine(topology::SystemRoot(), environment::of_process, environment::names_of_process());
  const auto subjects = wire_subjects(patient, command.wire);
  Report report(command.output, true, {{"benchmark", "wire"}});
  if (command.output.text()) {
    fmt::print("Each NIC writes to itself by this library's queue pairs, 32 KiB a message, {} s each.\n",
               command.wire.seconds);
    fmt::print("mean: of a round trip of 16 KiB and a flag, or of a fetch-add among many. nominal: of the link.\n\n");
    fmt::print(kWireLine, "NIC", "operation", "by", "mean us", "GB/s", "nominal", "share");
  }
  run_wire(subjects, command.wire.seconds, [&](const Figure& figure) {
    report.add(figure);
    if (command.output.text()) print_wire_line(figure);
  });
  return report.finish();
}

}  // namespace

void add_bench_wire(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand("wire", "RDMA writes out of GPU memory: each NIC alone, then all at once");
  auto options = std::make_shared<WireCommand>();
  command->add_option("--nic", options->wire.nics, "all, or names as mlx5_0 or mlx5_0:1")->delimiter(',');
  command
      ->add_option("--wire", options->wire.wire,
                   "auto: NICs; local: copies within this machine; simulated[:key=value,...]: a kernel that plays a "
                   "NIC")
      ->capture_default_str();
  add_device_option(*command, options->wire.device);
  command->add_option("--seconds", options->wire.seconds, "Of each measurement")
      ->check(CLI::Range(0.01, 60.0))
      ->capture_default_str();
  command->add_flag("--quick", options->quick, "0.05 s for each");
  add_output_options(*command, options->output);
  command->footer("Exit status: 1 where there is no NIC, or one fails.");
  command->callback([options, &action] { action = [options] { return run_wire_command(*options); }; });
}

}  // namespace deep_ep::tools
