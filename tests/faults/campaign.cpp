#include "tests/faults/campaign.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <set>
#include <thread>

#include "csrc/support/format.hpp"
#include "tests/faults/runs.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::faults {
namespace {

namespace fs = std::filesystem;

constexpr double kDeadline_s = 0.3;
/// A rank may be late on a busy machine without being at fault: what is found is looked at again, with more time.
constexpr int kRepetitions = 3;
constexpr double kLonger = 6;
/// If the schedule has a seed, a block stands still beside every few flags, and each time it waits for its next turn
/// among the blocks of all runs at once. On a busy machine its rank then works, and reports no wait, for seconds.
constexpr double kLongerWithSeed = 8;
/// Between these, nothing runs, and what the process holds is compared.
constexpr int kRunsBetweenLooks = 200;

long entries(const char* folder) {
  std::error_code error;
  return std::distance(fs::directory_iterator(folder, error), fs::directory_iterator());
}

struct Runner {
  struct Finding {
    std::uint64_t seed;
    Plan plan;
    std::vector<Violation> found;
  };
  Campaign& result;
  const CampaignOptions& options;
  std::mutex mutex{};
  std::vector<Finding> findings{};

  double deadline_of(const Plan& plan) const {
    return plan.host.seed != 0 ? kLongerWithSeed * result.deadline_s : result.deadline_s;
  }

  /// Calls work(i) for each i below `end`, from `next` on, in so many threads.
  template <class Work>
  static void run_all(int at_once, std::atomic<int>& next, int end, Work work) {
    std::vector<std::thread> threads;
    for (int t = 0; t < at_once; ++t) {
      threads.emplace_back([&] {
        for (int i = next++; i < end; i = next++) work(i);
      });
    }
    for (auto& thread : threads) thread.join();
  }

  void one(std::uint64_t seed) {
    const Plan plan = make_plan(seed, options.only ? *options.only : pick_fault(seed));
    Verdict verdict = run(plan, deadline_of(plan));
    const std::lock_guard lock(mutex);
    ++result.runs;
    const auto fault = static_cast<std::size_t>(plan.fault);
    ++result.outcomes[fault][verdict.summary];
    result.slowest[fault] = std::max(result.slowest[fault], verdict.slowest);
    if (!verdict.violations.empty()) findings.push_back({seed, plan, std::move(verdict.violations)});
  }

  /// Looks again at what was found, when few runs are under way: a moment in which the machine stood still is over.
  void look_again() {
    std::atomic<int> next = 0;
    run_all(2, next, static_cast<int>(findings.size()), [&](int i) { repeat(findings[static_cast<std::size_t>(i)]); });
    findings.clear();
  }

 private:
  void repeat(Finding& finding) {
    std::set<Violation::Kind> again;
    std::vector<Violation>& found = finding.found;
    const bool suspicious = std::ranges::any_of(found, [](const Violation& one) { return fails_a_test(one.kind); });
    for (int i = 0; suspicious && again.empty() && i < kRepetitions; ++i) {
      for (const Violation& one : run(finding.plan, kLonger * deadline_of(finding.plan)).violations) {
        again.insert(one.kind);
        if (std::none_of(found.begin(), found.end(), [&](const Violation& v) { return v.kind == one.kind; })) {
          found.push_back(one);
        }
      }
    }
    const std::lock_guard lock(mutex);
    for (const Violation& violation : found) {
      result.failures.push_back({finding.plan.fault,
                                 finding.seed,
                                 {violation.kind, violation.text + "; " + finding.plan.describe()},
                                 again.contains(violation.kind)});
    }
  }
};

}  // namespace

bool fails_a_test(Violation::Kind kind) {
  return !test::under_sanitizer() || (kind != Violation::Kind::blame && kind != Violation::Kind::split);
}

Holdings Holdings::now() {
  Holdings held{.threads = entries("/proc/self/task"), .files = entries("/proc/self/fd")};
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) held.heaps += line.find("deep_ep_heap") != std::string::npos;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) held.resident_kib = std::stol(line.substr(6));
  }
  return held;
}

std::string Holdings::more_than(const Holdings& before) const {
  std::string text;
  const auto compare = [&](const char* what, long now, long then) {
    if (now > then) text += fmt::format("{} {}, before {}; ", now, what, then);
  };
  compare("threads", threads, before.threads);
  compare("file descriptors", files, before.files);
  compare("mapped heaps", heaps, before.heaps);
  return text;
}

std::string Holdings::describe() const {
  return fmt::format("{} threads, {} file descriptors, {} heaps, {} MiB resident", threads, files, heaps,
                     resident_kib / 1024);
}

Campaign run_campaign(const CampaignOptions& options) {
  const auto began = std::chrono::steady_clock::now();
  test::renew_time_factor();
  Campaign campaign;
  campaign.deadline_s = test::scaled(kDeadline_s);
  Runner runner{campaign, options};
  // Threads that wait poll: on a busy machine, many runs would take each other's time until deadlines mean nothing.
  const int at_once = test::under_thread_sanitizer() ? 2 : std::max(4, static_cast<int>(24 / test::time_factor()));
  std::atomic<int> next = 0;
  for (int end = std::min(kRunsBetweenLooks, options.runs); next < options.runs;
       end = std::min(end + kRunsBetweenLooks, options.runs)) {
    Runner::run_all(at_once, next, end, [&](int i) { runner.one(options.first_seed + static_cast<std::uint64_t>(i)); });
    runner.look_again();
    next = end;
    campaign.end = Holdings::now();
    if (campaign.begin.threads == 0) campaign.begin = campaign.end;  // the first runs start the worker threads
    if (const std::string more = campaign.end.more_than(campaign.begin); !more.empty()) {
      campaign.leaks += fmt::format("after {} runs from seed {}: {}\n", end, options.first_seed, more);
    }
    if (options.progress) {
      const auto again =
          std::count_if(campaign.failures.begin(), campaign.failures.end(), [](auto& f) { return f.again; });
      std::fprintf(stderr, "%d of %d runs, %zu findings, %ld of them again; %s\n", end, options.runs,
                   campaign.failures.size(), static_cast<long>(again), campaign.end.describe().c_str());
    }
  }
  campaign.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  return campaign;
}

std::string Campaign::verdict() const {
  std::string text = leaks;
  for (const Failure& failure : failures) {
    if (!failure.again || !fails_a_test(failure.violation.kind)) continue;
    text += fmt::format("{}: {}\n", name_of(failure.violation.kind), failure.violation.text);
  }
  return text;
}

std::string Campaign::report() const {
  std::string text = fmt::format("{} runs in {:.0f} s, deadline {:.2f} s\n\n", runs, seconds, deadline_s);
  for (std::size_t f = 0; f < outcomes.size(); ++f) {
    if (outcomes[f].empty()) continue;
    text += fmt::format("- {}:", name_of(static_cast<Fault>(f)));
    for (const auto& [kind, count] : outcomes[f]) text += fmt::format(" {} {},", count, kind);
    const auto findings = [&](bool again) {
      return std::ranges::count_if(
          failures, [&](const Failure& one) { return one.fault == static_cast<Fault>(f) && one.again >= again; });
    };
    text += fmt::format(" slowest error after {:.2f} deadlines, {} findings, {} of them again\n", slowest[f],
                        findings(false), findings(true));
  }
  text += fmt::format("\nAfter the first runs: {}. At the end: {}.\nLeaks: {}\n", begin.describe(), end.describe(),
                      leaks.empty() ? "none" : leaks);
  for (const Failure& failure : failures) {
    text += fmt::format("\n- {}{}: {}", name_of(failure.violation.kind),
                        failure.again ? "" : " (not again with longer deadlines)", failure.violation.text);
  }
  return text + "\n";
}

}  // namespace deep_ep::faults
