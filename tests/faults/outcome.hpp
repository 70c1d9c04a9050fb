// How a run ended for each rank, and what is wrong with that.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "tests/faults/plan.hpp"

namespace deep_ep::faults {

struct Outcome {
  bool reached = false;     ///< the fault happened, if it is this rank's
  bool completed = false;   ///< all calls returned, and their results are right
  std::string error;        ///< class of what was thrown, if it was
  std::string text;         ///< of that
  int step = 0;             ///< the last call
  double waited = 0;        ///< seconds from the call, or the fault if that came later, to the error
  std::vector<int> masked;  ///< at the end
  std::string wrong;        ///< a result that is not the oracle's, or another rule that was broken
  std::string left_over;    ///< what the rank did not give back

  std::string describe() const;
  /// In lines, for another process.
  std::string write() const;
  static Outcome read(const std::string& lines);
};

/// The class of an exception of the library, or "exception".
std::string class_of(const std::exception& error);

struct Violation {
  enum class Kind {
    wrong,
    error,
    blame,  ///< names a rank that is not at fault
    split,  ///< masks one, or survivors do not mask the same ranks
    late,
    leak,
    next,
  };
  Kind kind = Kind::wrong;
  std::string text;
};
inline constexpr int kViolations = static_cast<int>(Violation::Kind::next) + 1;
const char* name_of(Violation::Kind kind);

struct Verdict {
  std::vector<Violation> violations;
  std::string summary;             ///< what happened, in a word: "completed", "TimeoutError", "masked", ...
  double slowest = 0;              ///< the longest time to an error, in deadlines
  std::vector<std::string> ranks;  ///< how it ended for each
};

/// `next`: what a clean round on a new buffer in the same processes threw.
Verdict judge(const Plan& plan, const std::vector<Outcome>& outcomes, const std::string& next, double deadline_s);

}  // namespace deep_ep::faults
