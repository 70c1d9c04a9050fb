// Ranks as processes of this program: what only a signal can do to a rank.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "csrc/support/format.hpp"
#include "tests/cluster/meeting_point.hpp"
#include "tests/cluster/rank_processes.hpp"
#include "tests/faults/rank_run.hpp"
#include "tests/faults/runs.hpp"
#include "tests/support/child_process.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::faults {
namespace {

using Clock = std::chrono::steady_clock;

struct Child : test::Child {
  Clock::time_point continues = Clock::time_point::max();
};

Child start(const Plan& plan, int rank, double deadline_s, const std::string& meeting_point,
            const std::string& of_the_next) {
  return {test::start_again({"rank" + std::to_string(rank), kRankArgument, std::to_string(rank),
                             std::to_string(plan.seed), std::to_string(static_cast<int>(plan.fault)),
                             std::to_string(deadline_s), meeting_point, of_the_next, std::to_string(getpid())},
                            {}, STDOUT_FILENO)};
}

/// A child that has stopped goes on after a while.
void look_after(Child& child, double hold_s) {
  if (child.ended) return;
  if (Clock::now() > child.continues) {
    child.continues = Clock::time_point::max();
    kill(child.pid, SIGCONT);
  }
  if (waitpid(child.pid, &child.status, WNOHANG | WUNTRACED) != child.pid) return;
  if (WIFSTOPPED(child.status)) {
    child.continues = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(hold_s));
  } else {
    child.ended = true;
  }
}

Outcome outcome_of(const Child& child, bool hung, bool lost) {
  const std::string text = child.written();
  if (!hung && WIFEXITED(child.status) && WEXITSTATUS(child.status) == 0) return Outcome::read(text);
  Outcome outcome;
  outcome.reached = true;
  if (hung) {
    outcome.wrong = "the process hangs";
  } else if (!lost) {
    outcome.wrong = WIFSIGNALED(child.status) ? std::string("the process died: ") + strsignal(WTERMSIG(child.status))
                                              : "the process failed: " + text;
  }
  return outcome;
}

}  // namespace

Verdict run_processes(const Plan& plan, double deadline_s) {
  const test::MeetingPoint meeting_point, of_the_next;
  std::vector<Child> children;
  for (int r = 0; r < plan.ranks; ++r) {
    children.push_back(start(plan, r, deadline_s, meeting_point.path(), of_the_next.path()));
  }
  const double limit_s = 4 * static_cast<double>(plan.steps.size() + 4) * deadline_s + 6 * test::patience();
  const auto limit = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limit_s));
  bool running = true;
  while (running && Clock::now() < limit) {
    running = false;
    for (Child& child : children) {
      look_after(child, plan.hold * deadline_s);
      running |= !child.ended;
    }
    if (running) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  std::vector<Outcome> outcomes;
  for (int r = 0; r < plan.ranks; ++r) {
    Child& child = children[static_cast<std::size_t>(r)];
    const bool hung = child.end();
    outcomes.push_back(outcome_of(child, hung, plan.fault == Fault::kill && r == plan.rank));
    close(child.output);
  }
  return judge(plan, outcomes, {}, deadline_s);
}

int run_one_rank(int count, char** arguments) {
  if (count != 9) return 2;
  test::end_with(std::atoi(arguments[8]));
  const int rank = std::atoi(arguments[2]);
  const Plan plan = make_plan(std::strtoull(arguments[3], nullptr, 10), static_cast<Fault>(std::atoi(arguments[4])));
  const double deadline_s = std::atof(arguments[5]);
  const double patience_s = 3 * test::patience() + 8 * deadline_s;
  const Data data = make_data(plan);
  const auto executor = std::make_shared<FaultyExecutor>(plan.host, plan.ranks);
  FaultTime time;
  Outcome outcome;
  {
    const auto bootstrap =
        std::make_shared<FaultyBootstrap>(test::meet_at(arguments[6], rank, plan.ranks, patience_s), patience_s);
    RankRun self(plan, data,
                 {.rank = rank,
                  .executor = executor,
                  .bootstrap = bootstrap,
                  .strike = [&] { kill(getpid(), plan.fault == Fault::kill ? SIGKILL : SIGSTOP); },
                  .time = &time},
                 deadline_s);
    outcome = self.run();
  }
  // Those who are left make a new buffer. (The killed rank is not among them, even if its moment never came.)
  const bool lost = plan.fault == Fault::kill;
  const int left = lost ? plan.ranks - 1 : plan.ranks;
  if (!(lost && rank == plan.rank)) {
    try {
      run_clean_round(test::meet_at(arguments[7], rank - (lost && rank > plan.rank ? 1 : 0), left, patience_s),
                      executor);
    } catch (const std::exception& error) {
      outcome.wrong += fmt::format(" on a new buffer: {}", error.what());
    }
  }
  outcome.left_over = executor->left_over();
  std::fputs(outcome.write().c_str(), stdout);
  std::fflush(stdout);
  return 0;
}

}  // namespace deep_ep::faults
