#include "tools/bench/wire.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "csrc/rdma/nic_test/judge.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "kernels/rdma/nic_test.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

using rdma::nic_test::Bench;
using rdma::nic_test::kMostPairs;
using rdma::nic_test::Line;
using rdma::nic_test::Outcome;
using rdma::nic_test::Rate;
using rdma::nic_test::Run;
using rdma::nic_test::Subject;

/// "mlx5_0:1" of "mlx5_0:1, rung by GPU 0"; "wire local" of one without a NIC.
std::string nic_of(const Subject& subject) { return subject.name.substr(0, subject.name.find_first_of(",(")); }

std::string without_blanks_behind(std::string text) {
  while (text.ends_with(' ')) text.pop_back();
  return text;
}

bool is_wanted(const Subject& subject, const std::vector<std::string>& nics) {
  const std::string nic = without_blanks_behind(nic_of(subject));
  return nics.empty() || std::ranges::any_of(nics, [&](const std::string& name) {
           return name == nic || name == nic.substr(0, nic.rfind(':'));
         });
}

void require(const Subject& subject, const Line& line) {
  if (line.outcome != Outcome::fail) return;
  throw Error(fmt::format("{}: {}; {}", subject.name, line.found, line.action));
}

/// One NIC, with queue pairs to itself.
class OneWire {
 public:
  explicit OneWire(const Subject& subject)
      : subject_(subject), bootstrap_(make_thread_bootstraps(1).front()), bench_(*bootstrap_, subject.executor) {
    try {
      bench_.connect(subject.make, kMostPairs);
    } catch (const Error& error) {
      throw Error(fmt::format("{}: {}", subject.name, error.what()));
    }
  }

  Figure writes(int pairs, double seconds) {
    const Run run = measure(NicTestTask::writes, pairs, seconds);
    require(subject_, rdma::nic_test::judge_bandwidth({Rate{pairs, run}}, subject_.link_gbps));
    Figure figure = start("write", deep_ep::nic_test::kMessageBytes);
    figure.mode = fmt::format("{} {}", pairs, pairs == 1 ? "queue pair" : "queue pairs");
    figure.gb_per_s = static_cast<double>(run.bytes()) / run.seconds() * 1e-9;
    return figure;
  }

  Figure round_trips(double seconds) {
    const Run run = measure(NicTestTask::litmus, 1, seconds);
    require(subject_, rdma::nic_test::judge_litmus(run));
    Figure figure = start("round trip", 4 * deep_ep::nic_test::kLitmusWords);
    figure.mode = "data and flag";
    figure.mean_us = time_of_one(run);
    return figure;
  }

  Figure additions(double seconds) {
    const Run run = measure(NicTestTask::additions, 1, seconds);
    require(subject_, rdma::nic_test::judge_additions(run));
    Figure figure = start("fetch-add", sizeof(std::uint64_t));
    figure.mode = "1 queue pair";
    figure.mean_us = time_of_one(run);
    return figure;
  }

 private:
  Run measure(NicTestTask what, int pairs, double seconds) {
    constexpr double kPatience = 5;  // seconds, for what must come
    return bench_.run({.what = what, .pairs = pairs, .seconds = seconds, .wait_s = kPatience});
  }
  static double time_of_one(const Run& run) {
    return run.seconds() * 1e6 / static_cast<double>(std::max<std::uint64_t>(run.operations(), 1));
  }

  Figure start(const char* operation, std::int64_t bytes) const {
    Figure figure;
    figure.benchmark = "wire";
    figure.operation = operation;
    figure.by = "deep_ep";
    figure.device = name_of(subject_.executor->device().kind);
    figure.nic = without_blanks_behind(nic_of(subject_));
    figure.bytes = bytes;
    if (subject_.link_gbps > 0) figure.nominal_gb_per_s = subject_.link_gbps / 8;
    return figure;
  }

  const Subject& subject_;
  std::shared_ptr<Bootstrap> bootstrap_;
  Bench bench_;
};

/// All NICs, each driven by a thread of its own, and their sum.
void run_at_once(const std::vector<Subject>& subjects, double seconds,
                 const std::function<void(const Figure&)>& report) {
  std::vector<Figure> figures(subjects.size());
  const auto barriers = make_thread_bootstraps(static_cast<int>(subjects.size()));
  run_ranks(static_cast<int>(subjects.size()), [&](int i) {
    const auto at = static_cast<std::size_t>(i);
    subjects[at].executor->make_current();
    OneWire wire(subjects[at]);
    barriers[at]->barrier();
    figures[at] = wire.writes(kMostPairs, seconds);
    barriers[at]->barrier();  // nobody stops driving its NIC's queue pairs before the others have measured
  });
  Figure all = figures.front();
  all.nic = "all";
  all.gb_per_s = 0;
  all.nominal_gb_per_s = 0;
  for (Figure& figure : figures) {
    figure.operation = "write, all at once";
    *all.gb_per_s += *figure.gb_per_s;
    *all.nominal_gb_per_s += figure.nominal_gb_per_s.value_or(0);
    report(figure);
  }
  if (*all.nominal_gb_per_s == 0) all.nominal_gb_per_s.reset();
  all.operation = "write, all at once";
  all.note = fmt::format("sum of {} NICs", figures.size());
  report(all);
}

}  // namespace

std::vector<Subject> wire_subjects(const Patient& patient, const WireOptions& options) {
  SubjectChoice choice;
  choice.device = options.device;
  try {
    choice.wire = rdma::parse_wire(options.wire == "auto" ? "verbs" : options.wire);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("--wire {}: {}", options.wire, error.what()));
  }
  const bool needs_nic = choice.wire.kind == rdma::WireKind::verbs;
  constexpr const char* kInstead = "--wire local or --wire simulated measures the software NIC instead";
  if (needs_nic && patient.nics.empty()) {
    throw Error(fmt::format("there is no RDMA device on this machine, so no NIC to measure; {}", kInstead));
  }
  Subjects found = find_subjects(patient, choice);
  std::erase_if(found.subjects, [&](const Subject& subject) { return !is_wanted(subject, options.nics); });
  if (!found.subjects.empty()) return std::move(found.subjects);
  std::string why;
  for (const Line& line : found.left_out) why += (why.empty() ? "" : "; ") + line.found;
  if (!options.nics.empty()) {
    throw InvalidArgument(fmt::format("--nic {}: no such NIC can be measured here{}{}", fmt::join(options.nics, ","),
                                      why.empty() ? "" : ": ", why));
  }
  throw Error(fmt::format("no NIC of this machine can be measured: {}; {}", why, kInstead));
}

void run_wire(const std::vector<Subject>& subjects, double seconds, const std::function<void(const Figure&)>& report) {
  for (const Subject& subject : subjects) {
    show_progress(fmt::format("{}", subject.name));
    subject.executor->make_current();
    OneWire wire(subject);
    report(wire.round_trips(seconds));
    report(wire.additions(seconds));
    for (int pairs = 1; pairs <= kMostPairs; pairs *= 2) report(wire.writes(pairs, seconds));
  }
  if (subjects.size() > 1) {
    show_progress("all NICs at once");
    run_at_once(subjects, seconds, report);
  }
  clear_progress();
}

}  // namespace deep_ep::tools
