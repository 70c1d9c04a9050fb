#include "simulation/nic_test/nic_test.hpp"

#include <algorithm>
#include <exception>
#include <functional>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "simulation/nic_test/judge.hpp"

namespace deep_ep::rdma::nic_test {
namespace {

namespace layout = deep_ep::nic_test;

constexpr double kMostOfAWay = 2;  ///< seconds for a completion; there are several ways, and most answer at once

/// The checks of one NIC, one after the other. What ranks decide by the clock or by what they saw, they decide alike.
class Examination {
 public:
  Examination(Bootstrap& bootstrap, const Subject& subject, const Limits& limits)
      : bootstrap_(bootstrap), subject_(subject), limits_(limits), bench_(bootstrap, subject.executor) {}

  Lines examine() {
    check("queue_pairs", [&] {
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
    if (anywhere(subject_.wants_gpu_handler)) check("handler", [&] { return handler(); });
    bool stuck = false;
    check("entries", [&] {
      stuck = true;  // also where it throws
      const Run run = measure({layout::kEntries, 1, limits_.entries, limits_.entries_s});
      stuck = anywhere(run.fault.has_value());
      return judge_entries("entries", run, /*must_wrap=*/true);
    });
    // Where nothing moves at all these would only wait in vain: that time is for the other ways.
    const auto check_movement = [&](const char* name, const std::function<Line()>& examine) {
      stuck ? lines_.push_back(Line{name, Outcome::skip, "entries did not get through"}) : check(name, examine);
    };
    check_movement("litmus", [&] { return judge_litmus(measure(layout::kLitmus)); });
    check_movement("atomics", [&] { return judge_additions(measure(layout::kAdditions)); });
    check_movement("bandwidth", [&] { return bandwidth(); });
    check_movement("wrong_key", [&] { return wrong_key(); });
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

  /// By queue pairs as a run has them, new ones where those before have failed.
  Run measure(Task task) {
    if (!connected_) connect();
    task.wait_s = limits_.wait_s;
    return bench_.run(task);
  }
  Run measure(const NicTestTask& what, int pairs = 1) {
    return measure({.what = what, .pairs = pairs, .seconds = limits_.phase_s});
  }

  /// What is thrown is a failure. Always adds one line.
  void check(const std::string& name, const std::function<Line()>& examine) {
    if (anywhere(deadline_.expired())) {
      lines_.push_back({name, Outcome::skip, fmt::format("no time was left of {} s", deadline_.seconds())});
      return;
    }
    Line line;
    const auto failure = first_failure(bootstrap_, [&] {
      try {
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
    if (!subject_.wants_gpu_handler)
      return Line{"handler", Outcome::skip, "kernels are not to ring this machine's NIC"};
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
      if (anywhere(runs.back().fault.has_value() || runs.back().wrong.has_value())) break;
    }
    return judge_bandwidth(runs, subject_.link);
  }

  Line wrong_key() {
    log::info("{}", kFailuresBegin);
    const std::shared_ptr<void> to_the_end(nullptr, [](void*) { log::info("{}", kFailuresEnd); });
    // Wrong in one of mlx5's eight bits that tell a key from older ones of the same memory.
    const Run run = measure({.what = {}, .seconds = limits_.phase_s, .wrong_bits = 0x80});
    bench_.disconnect();  // before that ends: devices report such failures late, too
    connected_ = false;
    return judge_wrong_key(run);
  }

  void check_other_ways() {
    if (subject_.others.empty()) lines_.push_back(Line{"way", Outcome::skip, subject_.no_others});
    for (const NicHandler other : subject_.others) {
      check("way", [&] {
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
  const Deadline deadline_{limits_.seconds};
  Bench bench_;
  Lines lines_;
  bool connected_ = false;
};

}  // namespace

Lines test_nic(Bootstrap& bootstrap, const Subject& subject, const Limits& limits) {
  return Examination(bootstrap, subject, limits).examine();
}

}  // namespace deep_ep::rdma::nic_test
