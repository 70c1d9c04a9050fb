// Processes that the tool starts; and that the selftest notices mistakes.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <optional>
#include <string>
#include <vector>

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

/// Runs all until one has failed or all have ended, and then ends the others.
std::vector<std::optional<int>> run(const std::vector<ChildCommand>& commands) {
  Children children(commands);
  while (children.running() > 0 && !children.first_failure()) children.step();
  children.signal_all(SIGTERM);
  while (children.running() > 0) children.step();
  std::vector<std::optional<int>> statuses;
  for (std::size_t i = 0; i < commands.size(); ++i) statuses.push_back(children.status(i));
  return statuses;
}

TEST(Children, GiveOutputAndStatus) {
  const auto of = [&](ChildCommand command, const char* printed) {
    const PrintedText output, errors;
    command.output = output.fd();
    command.errors = errors.fd();
    const std::optional<int> status = run({command}).front();
    EXPECT_EQ(output.text() + errors.text(), printed);
    return status;
  };
  EXPECT_EQ(of({.words = {"sh", "-c", "echo out; echo $NAME >&2"}, .variables = {{"NAME", "why"}}}, "out\nwhy\n"), 0);
  EXPECT_EQ(of({.words = {"sh", "-c", "kill -9 $$"}}, ""), 128 + 9);
  EXPECT_EQ(describe_status(128 + 9), "signal 9 (Killed)");
  EXPECT_EQ(of({.words = {"/nonexistent/program"}}, "/nonexistent/program: No such file or directory\n"), 127);
}

TEST(Children, EndTogether) {
  const auto begin = std::chrono::steady_clock::now();
  const auto statuses = run({{.words = {"sh", "-c", "sleep 1000 & sleep 1000"}}, {.words = {"false"}}});
  EXPECT_EQ(statuses[1], 1);
  EXPECT_EQ(statuses[0], 128 + SIGTERM);
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
