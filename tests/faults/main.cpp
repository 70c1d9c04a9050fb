// The tests, and, by scripts/faults, longer campaigns.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "deep_ep/log.hpp"
#include "tests/faults/campaign.hpp"
#include "tests/faults/runs.hpp"

namespace {

using namespace deep_ep::faults;

/// --campaign RUNS SEED [FAULT]: exit status 1 if anything is wrong.
int campaign(int runs, std::uint64_t seed, std::optional<Fault> only) {
  const Campaign result = run_campaign({.first_seed = seed, .runs = runs, .only = only, .progress = true});
  std::fputs(result.report().c_str(), stdout);
  return result.verdict().empty() ? 0 : 1;
}

/// --repeat SEED DEADLINE_S [FAULT]: one run, in words.
int repeat(std::uint64_t seed, double deadline_s, std::optional<Fault> only) {
  const Plan plan = make_plan(seed, only ? *only : pick_fault(seed));
  std::printf("%s\n", plan.describe().c_str());
  const Verdict verdict = run(plan, deadline_s);
  std::printf("%s, slowest error after %.2f deadlines\n", verdict.summary.c_str(), verdict.slowest);
  for (std::size_t r = 0; r < verdict.ranks.size(); ++r) std::printf("rank %zu: %s\n", r, verdict.ranks[r].c_str());
  for (const Violation& one : verdict.violations) std::printf("%s: %s\n", name_of(one.kind), one.text.c_str());
  return verdict.violations.empty() ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  // Thousands of faults make thousands of lines, which say nothing that an outcome does not say.
  if (std::getenv("DEEP_EP_LOG") == nullptr) deep_ep::set_log_sink([](deep_ep::LogLevel, std::string_view) {});
  const std::string what = count > 1 ? arguments[1] : "";
  if (what == kRankArgument) return run_one_rank(count, arguments);
  const auto number = [&](int i) { return std::strtoull(arguments[i], nullptr, 10); };
  const auto only = [&](int i) { return count > i ? std::optional(fault_of(arguments[i])) : std::nullopt; };
  try {
    if (what == "--campaign" && count >= 4) return campaign(static_cast<int>(number(2)), number(3), only(4));
    if (what == "--repeat" && count >= 4) return repeat(number(2), std::atof(arguments[3]), only(4));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "faults: %s\n", error.what());
    return 2;
  }
  testing::InitGoogleTest(&count, arguments);
  return RUN_ALL_TESTS();
}
