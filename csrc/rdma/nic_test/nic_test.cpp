#include "csrc/rdma/nic_test/nic_test.hpp"

#include <exception>
#include <functional>
#include <utility>

#include "csrc/rdma/nic_test/judge.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::nic_test {
namespace {

/// The checks of one NIC, one after the other. What ranks decide by the clock or by what they saw, they decide alike.
class Examination {
 public:
  Examination(Bootstrap& bootstrap, const Subject& subject, const Limits& limits, const Deadline& deadline)
      : subject_(subject), limits_(limits), deadline_(deadline), bench_(bootstrap, subject.executor, limits.wait_s) {}

  Lines examine() {
    check("queue_pairs", [&] {
      connect();
      return Line{"queue_pairs", Outcome::pass,
                  fmt::format("{} connected: {}", 2 * kMostPairs, bench_.ends().describe()), "", ""};
    });
    if (!connected_) return std::move(lines_);
    if (subject_.wants_gpu_handler) check_connected("handler", [&] { return handler(); });
    check_connected("entries", [&] {
      return judge_entries("entries", bench_.run({NicTestTask::entries, 1, limits_.entries, limits_.entries_s}),
                           limits_.wait_s, /*must_wrap=*/true);
    });
    check_connected("litmus", [&] { return judge_litmus(measure(NicTestTask::litmus, 1), limits_.wait_s); });
    check_connected("atomics", [&] { return judge_additions(measure(NicTestTask::additions, 1), limits_.wait_s); });
    check_connected("bandwidth", [&] { return bandwidth(); });
    check_connected("query_qp", [&] { return query(); });
    check_connected("wrong_key", [&] { return judge_wrong_key(measure(NicTestTask::wrong_key, 1), limits_.wait_s); });
    check_other_ways();
    return std::move(lines_);
  }

 private:
  void connect() {
    connected_ = false;
    bench_.connect(subject_.make, kMostPairs);
    connected_ = true;
  }

  Run measure(NicTestTask what, int pairs) {
    return bench_.run({.what = what, .pairs = pairs, .seconds = limits_.phase_s});
  }

  /// What is thrown is a failure.
  void check(const std::string& name, const std::function<Line()>& examine) {
    if (bench_.anywhere(deadline_.expired())) {
      lines_.push_back(skipped(name, fmt::format("no time was left of {} s", deadline_.seconds())));
      return;
    }
    Line line;
    try {
      line = examine();
    } catch (const std::exception& error) {
      line = {name, Outcome::fail, error.what(), "the device, or the system, refuses what a run needs",
              "as the text says; deep_ep doctor looks at GPUs, NICs and drivers"};
    }
    if (bench_.anywhere(line.outcome == Outcome::fail)) connected_ = false;  // what it leaves may not work
    lines_.push_back(std::move(line));
  }

  /// The same on queue pairs as a run has them, new ones where those before have failed.
  void check_connected(const std::string& name, const std::function<Line()>& examine) {
    check(name, [&] {
      if (!connected_) connect();
      return examine();
    });
  }

  Line handler() {
    if (bench_.ends().rung_by_kernels()) return {"handler", Outcome::pass, "kernels ring the NIC", "", ""};
    return {"handler", Outcome::fail, "kernels cannot ring this NIC, so a CPU thread does (handler cpu)",
            "every message takes some microseconds more, and CPU time",
            "the lines `way: handler gpu` say why; if it is meant to be so, set DEEP_EP_NIC_HANDLER=cpu"};
  }

  Line bandwidth() {
    std::vector<Rate> rates;
    for (int pairs = 1; pairs <= kMostPairs; pairs *= 2) {
      rates.push_back({pairs, measure(NicTestTask::writes, pairs)});
      const Run& run = rates.back().run;
      if (bench_.anywhere(run.fault.has_value() || run.wrong() != nullptr)) break;
    }
    return judge_bandwidth(rates, subject_.link_gbps, limits_.wait_s);
  }

  Line query() {
    std::vector<QueuePairReport> report = bench_.ends().report();
    if (report.empty()) return skipped("query_qp", "only queue pairs of the handler gpu (DevX) can be asked");
    return judge_report(report);
  }

  void check_other_ways() {
    if (subject_.others.empty()) lines_.push_back(skipped("other_ways", subject_.no_others));
    for (const Way& way : subject_.others) {
      const std::string name = "way: " + way.name;
      check(name, [&]() -> Line {
        try {
          bench_.connect(way.make, 1);
        } catch (const Error& error) {
          return skipped(name, error.what());  // a device need not have all of them
        }
        return judge_entries(name, bench_.run({NicTestTask::entries, 1, 2000, limits_.entries_s}), limits_.wait_s,
                             /*must_wrap=*/false);
      });
    }
  }

  const Subject& subject_;
  const Limits& limits_;
  const Deadline& deadline_;
  Bench bench_;
  Lines lines_;
  bool connected_ = false;
};

}  // namespace

Lines test_nic(Bootstrap& bootstrap, const Subject& subject, const Limits& limits, const Deadline& deadline) {
  return Examination(bootstrap, subject, limits, deadline).examine();
}

}  // namespace deep_ep::rdma::nic_test
