// Processes that the tool starts; and that the selftest notices mistakes.
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "deep_ep/error.hpp"
#include "tools/bench/normal_mode_rank.hpp"
#include "tools/common/child.hpp"

namespace deep_ep::tools {
namespace {

template <class Call>
std::string error_in(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Children, GiveOutputStatusAndReason) {
  const auto results =
      run_children({{.words = {"sh", "-c", "echo out; echo $NAME >&2"}, .variables = {{"NAME", "deep_ep: why"}}}}, 60);
  EXPECT_EQ(results[0].output, "out\n");
  EXPECT_TRUE(results[0].well());
  EXPECT_EQ(results[0].reason(), "why");
  const ChildResult killed = run_children({{.words = {"sh", "-c", "kill -9 $$"}}}, 60)[0];
  EXPECT_EQ(killed.status, 128 + 9);
  EXPECT_EQ(killed.reason(), "it ended with signal 9 (Killed)");
  const ChildResult absent = run_children({{.words = {"/nonexistent/program"}}}, 60)[0];
  EXPECT_EQ(absent.status, 127);
  EXPECT_EQ(absent.reason(), "/nonexistent/program: No such file or directory");
}

TEST(Children, EndTogether) {
  const auto begin = std::chrono::steady_clock::now();
  const auto results = run_children({{.words = {"sh", "-c", "sleep 1000 & sleep 1000"}}, {.words = {"false"}}}, 600);
  EXPECT_EQ(results[1].status, 1);
  EXPECT_EQ(results[0].status, 128 + 9);
  EXPECT_FALSE(results[0].timed_out);
  const ChildResult late = run_children({{.words = {"sleep", "1000"}}}, 0.1)[0];
  EXPECT_TRUE(late.timed_out);
  EXPECT_EQ(late.reason(), "it took too long");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(300));
}

TEST(Selftest, NoticesRowsThatAreOthers) {
  const WorkloadShape shape{.ranks = 1, .tokens = 5, .hidden = 128, .topk = 2, .experts = 4};
  const Routes routes(shape, true);
  const RankTask task{shape, routes, make_thread_bootstraps(1).front(), make_executor(Device::Kind::cpu, 0)};
  NormalModeRank rank(task);
  for (const NormalModeCall& one : selftest_cases(1)) EXPECT_NO_THROW(run_selftest_case(rank, one)) << name_of(one);
  rank.destroy();
  WorkloadShape fewer = shape;
  fewer.tokens = 4;
  WorkloadShape wider = shape;
  wider.topk = 3;
  for (const auto& [other, what] : {std::pair(fewer, "received 5 BF16 rows"), std::pair(wider, "selections")}) {
    const Routes wrong(other, true);
    const RankTask mistaken{shape, wrong, task.bootstrap, task.executor};
    NormalModeRank one(mistaken);
    EXPECT_NE(error_in([&] { run_selftest_case(one, {}); }).find(what), std::string::npos) << what;
    one.destroy();
  }
}

}  // namespace
}  // namespace deep_ep::tools
