#include "simulation/nic_test/nic_test.hpp"

#include <algorithm>
#include <exception>
#include <functional>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "simulation/nic_test/judge.hpp"

namespace deep_ep::rdma::nic_test {
namespace {

namespace layout = deep_ep::nic_test;

constexpr double kMostOfAWay = 2;  ///< seconds for a completion; there are several ways, and most answer at once

/// While it lives, failures are meant to be.
class OnPurpose {
 public:
  OnPurpose() { log::info("{}", kFailuresBegin); }
  ~OnPurpose() { log::info("{}", kFailuresEnd); }
  OnPurpose(const OnPurpose&) = delete;
  OnPurpose& operator=(const OnPurpose&) = delete;
};

/// The checks of one NIC, one after the other. What ranks decide by the clock or by what they saw, they decide alike.
class Examination {
 public:
  Examination(Bootstrap& bootstrap, const Subject& subject, const Limits& limits, const Deadline& deadline)
      : bootstrap_(bootstrap),
        subject_(subject),
        limits_(limits),
        deadline_(deadline),
        bench_(bootstrap, subject.executor) {}

  Lines examine() {
    check("queue_pairs", Needs::nothing, [&] {
      connect();
      return Line{"queue_pairs", Outcome::pass,
                  fmt::format("{} connected: {}", 2 * kMostPairs, bench_.ends()->describe())};
    });
    if (connected_) check_as_in_a_run();
    check_other_ways();
    return std::move(lines_);
  }

 private:
  void check_as_in_a_run() {
    if (anywhere(subject_.wants_gpu_handler)) check("handler", Needs::queue_pairs, [&] { return handler(); });
    check("entries", Needs::queue_pairs, [&] {
      stuck_ = true;  // also where it throws
      const Run run = bench_.run({layout::kEntries, 1, limits_.entries, limits_.entries_s, limits_.wait_s});
      stuck_ = anywhere(run.fault.has_value());
      return judge_entries("entries", run, /*must_wrap=*/true);
    });
    check("litmus", Needs::movement, [&] { return judge_litmus(measure(layout::kLitmus, 1)); });
    check("atomics", Needs::movement, [&] { return judge_additions(measure(layout::kAdditions, 1)); });
    check("bandwidth", Needs::movement, [&] { return bandwidth(); });
    check("wrong_key", Needs::movement, [&] { return wrong_key(); });
  }

  void connect() {
    connected_ = false;
    bench_.connect(subject_.handler, subject_.make, kMostPairs);
    connected_ = true;
  }

  bool anywhere(bool mine) const {
    const std::vector<std::uint8_t> all = all_gather_values(bootstrap_, static_cast<std::uint8_t>(mine));
    return std::any_of(all.begin(), all.end(), [](std::uint8_t one) { return one != 0; });
  }

  Run measure(const NicTestTask& what, int pairs) {
    return bench_.run({.what = what, .pairs = pairs, .seconds = limits_.phase_s, .wait_s = limits_.wait_s});
  }

  enum class Needs {
    nothing,
    queue_pairs,  ///< as a run has them, new ones where those before have failed
    movement,     ///< it would only wait in vain where nothing moves at all: that time is for the other ways
  };

  /// What is thrown is a failure. Always adds one line.
  void check(const std::string& name, Needs needs, const std::function<Line()>& examine) {
    if (needs == Needs::movement && stuck_) {
      lines_.push_back(skipped(name, "entries did not get through"));
      return;
    }
    if (anywhere(deadline_.expired())) {
      lines_.push_back(skipped(name, fmt::format("no time was left of {} s", deadline_.seconds())));
      return;
    }
    Line line;
    const auto failure = first_failure(bootstrap_, [&] {
      try {
        if (needs != Needs::nothing && !connected_) connect();
        line = examine();
      } catch (const std::exception& error) {
        line = {name, Outcome::fail, error.what(), "the device, or the system, refuses what a run needs",
                "as the text says; deep_ep doctor looks at GPUs, NICs and drivers"};
      }
      if (line.outcome == Outcome::fail) throw SystemError(line.found);
    });
    if (failure) connected_ = false;  // what it leaves may not work
    if (failure && line.outcome != Outcome::fail) {
      line = {name, Outcome::fail, fmt::format("{}; but on the other machine: {}", line.found, failure->why),
              "these two machines cannot work together, even if each of them is all right",
              "see the other machine's report"};
    }
    lines_.push_back(std::move(line));
  }

  Line handler() {
    if (!subject_.wants_gpu_handler) return skipped("handler", "kernels are not to ring this machine's NIC");
    const NicHandler handler = bench_.ends()->handler();
    if (handler == NicHandler::gpu) return {"handler", Outcome::pass, "kernels ring the NIC"};
    return {"handler", Outcome::fail,
            fmt::format("kernels cannot ring this NIC, so a CPU thread does (handler {})", name_of(handler)),
            "every message takes some microseconds more, and CPU time",
            fmt::format("the lines `way` with handler gpu say why; if it is meant to be so, set DEEP_EP_NIC_HANDLER={}",
                        name_of(handler))};
  }

  Line bandwidth() {
    std::vector<Run> runs;
    for (int pairs = 1; pairs <= kMostPairs; pairs *= 2) {
      runs.push_back(measure(layout::kWrites, pairs));
      if (anywhere(runs.back().fault.has_value() || runs.back().wrong() != nullptr)) break;
    }
    return judge_bandwidth(runs, subject_.link);
  }

  Line wrong_key() {
    const OnPurpose on_purpose;
    const Run run = measure(layout::kWrongKey, 1);
    bench_.disconnect();  // before that ends: devices report such failures late, too
    connected_ = false;
    return judge_wrong_key(run);
  }

  void check_other_ways() {
    if (subject_.others.empty()) lines_.push_back(skipped("way", subject_.no_others));
    for (const NicHandler other : subject_.others) {
      check("way", Needs::nothing, [&] {
        bench_.connect(other, subject_.make, 1);
        const double wait_s = std::min(limits_.wait_s, kMostOfAWay);
        return judge_entries("way", bench_.run({layout::kEntries, 1, 2000, limits_.entries_s, wait_s}),
                             /*must_wrap=*/false);
      });
      lines_.back().found = fmt::format("handler {}: {}", name_of(other), lines_.back().found);
    }
  }

  Bootstrap& bootstrap_;
  const Subject& subject_;
  const Limits& limits_;
  const Deadline& deadline_;
  Bench bench_;
  Lines lines_;
  bool connected_ = false;
  bool stuck_ = false;  ///< entries do not get through
};

}  // namespace

Lines test_nic(Bootstrap& bootstrap, const Subject& subject, const Limits& limits, const Deadline& deadline) {
  return Examination(bootstrap, subject, limits, deadline).examine();
}

}  // namespace deep_ep::rdma::nic_test
