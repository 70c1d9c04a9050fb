// A run of a plan, with ranks as threads or as processes.
#pragma once

#include <string>

#include "tests/faults/outcome.hpp"

namespace deep_ep::faults {

/// Ends the program, with a text, when a run hangs.
Verdict run_threads(const Plan& plan, double deadline_s);
/// The same with processes of this program. A run that hangs is a violation.
Verdict run_processes(const Plan& plan, double deadline_s);
/// Whichever the fault needs.
Verdict run(const Plan& plan, double deadline_s);

/// What run_processes() starts this program with instead of its usual arguments; prints the outcome.
inline constexpr const char* kRankArgument = "--rank-of-a-run";
int run_one_rank(int count, char** arguments);

}  // namespace deep_ep::faults
