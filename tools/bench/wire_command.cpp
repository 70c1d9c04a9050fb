// `deep_ep bench wire`: what NICs carry when GPUs write through this library's own queue pairs.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "simulation/kernels/nic_test.hpp"
#include "simulation/nic_test/judge.hpp"
#include "tools/bench/benchmark.hpp"
#include "tools/common/command_line.hpp"
#include "tools/common/ranks.hpp"
#include "tools/common/variables.hpp"
#include "tools/doctor/nic_test/subjects.hpp"

namespace deep_ep::tools {
namespace {

using rdma::nic_test::kMostPairs;
using rdma::nic_test::Run;
using rdma::nic_test::Subject;

struct WireCommand {
  std::vector<std::string> nics;  ///< names, with or without the port; empty: all
  std::string wire = "auto";      ///< auto: NICs and nothing else
  std::string device = "auto";
  double seconds = 1;  ///< of each measurement
  bool quick = false;
  OutputOptions output;
};

/// "mlx5_0:1" of "mlx5_0:1, rung by GPU 0"; "wire local" of one without a NIC.
std::string nic_of(const Subject& subject) {
  return std::string(trim(std::string_view(subject.name).substr(0, subject.name.find_first_of(",("))));
}

bool is_wanted(const Subject& subject, const std::vector<std::string>& nics) {
  const std::string nic = nic_of(subject);
  return nics.empty() || std::ranges::any_of(nics, [&](const std::string& name) {
           return name == nic || name == nic.substr(0, nic.rfind(':'));
         });
}

/// One NIC, with queue pairs to itself.
class OneWire {
 public:
  explicit OneWire(const Subject& subject)
      : subject_(subject), bootstrap_(make_thread_bootstraps(1).front()), bench_(*bootstrap_, subject.executor) {
    try {
      bench_.connect(subject.make, kMostPairs);
    } catch (const Error& error) {
      fail<Error>("{}: {}", subject.name, error.what());
    }
  }

  Figure writes(int pairs, double seconds) {
    const Run run = measure(NicTestTask::writes, pairs, seconds);
    require(rdma::nic_test::judge_bandwidth({rdma::nic_test::Rate{pairs, run}}, subject_.link_gbps));
    Figure figure =
        start("write", fmt::format("{} queue pair{}", pairs, pairs == 1 ? "" : "s"), deep_ep::nic_test::kMessageBytes);
    figure.gb_per_s = static_cast<double>(run.bytes()) / run.seconds() * 1e-9;
    return figure;
  }

  Figure round_trips(double seconds) {
    const Run run = measure(NicTestTask::litmus, 1, seconds);
    require(rdma::nic_test::judge_litmus(run));
    return timed(start("round trip", "data and flag", 4 * deep_ep::nic_test::kLitmusWords), run);
  }

  Figure additions(double seconds) {
    const Run run = measure(NicTestTask::additions, 1, seconds);
    require(rdma::nic_test::judge_additions(run));
    return timed(start("fetch-add", "1 queue pair", sizeof(std::uint64_t)), run);
  }

 private:
  Run measure(NicTestTask what, int pairs, double seconds) {
    constexpr double kPatience = 5;  // seconds, for what must come
    return bench_.run({.what = what, .pairs = pairs, .seconds = seconds, .wait_s = kPatience});
  }

  void require(const rdma::nic_test::Line& line) const {
    if (line.outcome != rdma::nic_test::Outcome::fail) return;
    fail<Error>("{}: {}; {}", subject_.name, line.found, line.action);
  }

  static Figure timed(Figure figure, const Run& run) {
    figure.mean_us = run.seconds() * 1e6 / static_cast<double>(std::max<std::uint64_t>(run.operations(), 1));
    return figure;
  }

  Figure start(const char* operation, const std::string& mode, std::int64_t bytes) const {
    Figure figure;
    figure.benchmark = "wire";
    figure.operation = operation;
    figure.mode = mode;
    figure.by = "deep_ep";
    figure.device = name_of(subject_.executor->device().kind);
    figure.nic = nic_of(subject_);
    figure.bytes = bytes;
    if (subject_.link_gbps > 0) figure.nominal_gb_per_s = subject_.link_gbps / 8;
    return figure;
  }

  const Subject& subject_;
  std::shared_ptr<Bootstrap> bootstrap_;
  rdma::nic_test::Bench bench_;
};

/// All NICs, each driven by a thread of its own, and their sum.
void run_at_once(const std::vector<Subject>& subjects, double seconds, Report& report) {
  std::vector<Figure> figures(subjects.size());
  const auto barriers = make_thread_bootstraps(static_cast<int>(subjects.size()));
  run_ranks(static_cast<int>(subjects.size()), [&](int i) {
    const auto at = static_cast<std::size_t>(i);
    subjects[at].executor->make_current();
    OneWire wire(subjects[at]);
    barriers[at]->barrier();
    figures[at] = wire.writes(kMostPairs, seconds);
    barriers[at]->barrier();  // no thread stops driving its NIC's queue pairs before the others have measured
  });
  Figure all = figures.front();
  all.nic = "all";
  all.gb_per_s = 0;
  all.nominal_gb_per_s = 0;
  for (Figure& figure : figures) {
    figure.operation = "write, all at once";
    *all.gb_per_s += *figure.gb_per_s;
    *all.nominal_gb_per_s += figure.nominal_gb_per_s.value_or(0);
    report.add(figure);
  }
  if (*all.nominal_gb_per_s == 0) all.nominal_gb_per_s.reset();
  all.operation = "write, all at once";
  all.note = fmt::format("sum of {} NICs", figures.size());
  report.add(all);
}

/// The subjects to measure. @throws Error that says why there is none; InvalidArgument for a NIC that is not there.
std::vector<Subject> wire_subjects(const Patient& patient, const WireCommand& command) {
  const SubjectChoice choice{.wire = wire_of(command.wire == "auto" ? "verbs" : command.wire),
                             .device = command.device};
  constexpr const char* kInstead = "--wire local or --wire simulated measures the software NIC instead";
  if (choice.wire.kind == rdma::WireKind::verbs && patient.nics.empty()) {
    fail<Error>("there is no RDMA device on this machine, so no NIC to measure; {}", kInstead);
  }
  Subjects found = find_subjects(patient, choice);
  std::erase_if(found.subjects, [&](const Subject& subject) { return !is_wanted(subject, command.nics); });
  if (!found.subjects.empty()) return std::move(found.subjects);
  std::string why;
  for (const rdma::nic_test::Line& line : found.left_out) why += (why.empty() ? "" : "; ") + line.found;
  if (command.nics.empty()) fail<Error>("no NIC of this machine can be measured: {}; {}", why, kInstead);
  fail<InvalidArgument>("--nic {}: no such NIC can be measured here{}{}", fmt::join(command.nics, ","),
                        why.empty() ? "" : ": ", why);
}

/// Each NIC alone: round trips, fetch-adds, writes over 1 to 8 queue pairs; then, if there are several, all at once.
/// Each NIC talks to itself, out of the GPU's memory and back. @throws Error where a NIC fails, or data was wrong.
int run_wire(WireCommand command) {
  constexpr double kQuick = 0.05;
  const double seconds = command.quick ? kQuick : command.seconds;
  if (command.nics == std::vector<std::string>{"all"}) command.nics.clear();
  const Patient patient = examine(topology::SystemRoot(), environment::of_process, tools::names_of_process());
  const std::vector<Subject> subjects = wire_subjects(patient, command);
  Report report(command.output, true, {{"benchmark", "wire"}},
                {{{"NIC", &Figure::nic}, 15},
                 {{"operation", &Figure::operation}, 19},
                 {{"by", &Figure::mode}, 14},
                 {{"mean us", &Figure::mean_us}, 9, true},
                 {{"GB/s", &Figure::gb_per_s}, 9, true},
                 {{"nominal", &Figure::nominal_gb_per_s}, 8, true}});
  report.begin(fmt::format(
      "Each NIC writes to itself by this library's queue pairs, 32 KiB a message, {} s each.\n"
      "mean: of a round trip of 16 KiB and a flag, or of a fetch-add among many. nominal: GB/s of the link.\n",
      seconds));
  for (const Subject& subject : subjects) {
    show_progress(subject.name);
    subject.executor->make_current();
    OneWire wire(subject);
    report.add(wire.round_trips(seconds));
    report.add(wire.additions(seconds));
    for (int pairs = 1; pairs <= kMostPairs; pairs *= 2) report.add(wire.writes(pairs, seconds));
  }
  if (subjects.size() > 1) {
    show_progress("all NICs at once");
    run_at_once(subjects, seconds, report);
  }
  return report.finish();
}

}  // namespace

void add_bench_wire(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand("wire", "RDMA writes out of GPU memory: each NIC alone, then all at once");
  auto options = std::make_shared<WireCommand>();
  command->add_option("--nic", options->nics, "all, or names as mlx5_0 or mlx5_0:1")->delimiter(',');
  command
      ->add_option("--wire", options->wire,
                   "auto: NICs; local: copies within this machine; simulated[:key=value,...]: a kernel that plays a "
                   "NIC")
      ->capture_default_str();
  add_device_option(*command, options->device);
  add_number(*command, "--seconds", options->seconds, 0.01, 60.0, "Of each measurement")->capture_default_str();
  command->add_flag("--quick", options->quick, "0.05 s for each");
  add_output_options(*command, options->output);
  command->footer("Exit status: 1 where there is no NIC, or one fails.");
  command->callback([options, &action] { action = [options] { return run_wire(*options); }; });
}

}  // namespace deep_ep::tools
