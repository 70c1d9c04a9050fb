#include "tests/faults/runs.hpp"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/faults/rank_run.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::faults {
namespace {

/// Ranks that wait for those that are later by several deadlines.
double bootstrap_timeout(const Plan& plan, double deadline_s) {
  const bool never_come = plan.fault == Fault::bootstrap || plan.fault == Fault::set_up;
  return never_come ? deadline_s : test::patience() + 8 * deadline_s;
}

double hang_after(const Plan& plan, double deadline_s) {
  return 3 * static_cast<double>(plan.steps.size() + 3) * deadline_s + 2 * bootstrap_timeout(plan, deadline_s) +
         test::scaled(20);
}

[[noreturn]] void hang(const Plan& plan, const char* what) {
  std::fprintf(stderr, "faults: %s hangs: %s\n", what, plan.describe().c_str());
  std::abort();  // a thread cannot be ended from outside; a debugger or a core file shows where it is
}

std::string clean_round(const std::vector<std::shared_ptr<FaultyExecutor>>& executors) {
  const int ranks = static_cast<int>(executors.size());
  const auto bootstraps = make_thread_bootstraps(ranks, 2 * test::patience());
  const std::vector<std::string> thrown = deep_ep::run_threads(ranks, [&](int rank) {
    run_clean_round(bootstraps[static_cast<std::size_t>(rank)], executors[static_cast<std::size_t>(rank)]);
  });
  std::string failures;
  for (std::size_t r = 0; r < thrown.size(); ++r) {
    if (!thrown[r].empty()) failures += fmt::format("rank {} on a new buffer: {}; ", r, thrown[r]);
  }
  return failures;
}

}  // namespace

Verdict run_threads(const Plan& plan, double deadline_s) {
  const auto ranks = static_cast<std::size_t>(plan.ranks);
  const double patience_s = bootstrap_timeout(plan, deadline_s);
  const Data data = make_data(plan);
  const auto bootstraps = make_thread_bootstraps(plan.ranks, patience_s);
  FaultTime time;
  std::vector<std::shared_ptr<FaultyExecutor>> executors;
  std::vector<std::unique_ptr<RankRun>> selves;
  std::vector<Outcome> outcomes(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    executors.push_back(std::make_shared<FaultyExecutor>(plan.host, plan.ranks));
    RankParts parts{.rank = static_cast<int>(r),
                    .executor = executors[r],
                    .bootstrap = std::make_shared<FaultyBootstrap>(bootstraps[r], patience_s),
                    .time = &time};
    selves.push_back(std::make_unique<RankRun>(plan, data, std::move(parts), deadline_s));
  }
  std::atomic<int> running = plan.ranks;
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      outcomes[r] = selves[r]->run();
      --running;
    });
  }
  const auto wait_for_all_but = [&](int left, const char* what) {
    for (const Deadline deadline(hang_after(plan, deadline_s)); running > left;) {
      if (deadline.expired()) hang(plan, what);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  wait_for_all_but(plan.fault == Fault::freeze ? 1 : 0, "a rank");
  for (auto& executor : executors) executor->freezer->release();
  wait_for_all_but(0, "the rank that stood still");
  for (auto& thread : threads) thread.join();

  for (const auto& self : selves) self->drop_buffer();
  selves.clear();
  const std::string next = clean_round(executors);
  for (std::size_t r = 0; r < ranks; ++r) outcomes[r].left_over = executors[r]->left_over();
  return judge(plan, outcomes, next, deadline_s);
}

Verdict run(const Plan& plan, double deadline_s) {
  return of_processes(plan.fault) ? run_processes(plan, deadline_s) : run_threads(plan, deadline_s);
}

}  // namespace deep_ep::faults
