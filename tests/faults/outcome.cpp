#include "tests/faults/outcome.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <regex>
#include <sstream>

#include "csrc/support/format.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::faults {
namespace {

/// Ranks that a text says were waited for in vain: "for rank 3", "for ranks 1, 2 and 4".
std::vector<int> named_in(const std::string& text) {
  static const std::regex kRanks("for ranks? ([0-9]+(?:(?:, | and )[0-9]+)*)");
  static const std::regex kNumber("[0-9]+");
  std::vector<int> ranks;
  std::smatch found;
  if (!std::regex_search(text, found, kRanks)) return ranks;
  const std::string list = found[1];
  for (std::sregex_iterator it(list.begin(), list.end(), kNumber), end; it != end; ++it) {
    ranks.push_back(std::stoi(it->str()));
  }
  return ranks;
}

bool has(const std::vector<int>& ranks, int rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); }

class Judge {
 public:
  Judge(const Plan& plan, const std::vector<Outcome>& outcomes, double deadline_s)
      : plan_(plan), outcomes_(outcomes), deadline_s_(deadline_s), reached_(outcome(plan.rank).reached) {}

  Verdict verdict() {
    for (rank_ = 0; rank_ < plan_.ranks; ++rank_) judge_rank();
    if (plan_.looks_for_survivors()) judge_survivors();
    result_.summary = summary();
    return std::move(result_);
  }

 private:
  const Outcome& outcome(int rank) const { return outcomes_[static_cast<std::size_t>(rank)]; }

  void blame(Violation::Kind kind, const std::string& what) {
    result_.violations.push_back({kind, fmt::format("rank {}: {} ({})", rank_, what, outcome(rank_).describe())});
  }

  void judge_rank() {
    const Outcome& mine = outcome(rank_);
    const bool own = rank_ == plan_.rank;
    if (!mine.wrong.empty()) blame(Violation::Kind::wrong, mine.wrong);
    if (!mine.left_over.empty()) blame(Violation::Kind::leak, mine.left_over);
    if (own && (plan_.fault == Fault::stop || plan_.fault == Fault::kill)) return;
    if (!mine.error.empty()) {
      if (!(own && plan_.fault == Fault::freeze)) note_time(mine.waited - (own ? plan_.hold * deadline_s_ : 0));
      judge_error(mine, own);
    } else if (reached_ && (plan_.fault == Fault::bootstrap || plan_.fault == Fault::set_up)) {
      blame(Violation::Kind::error, "no error");
    }
    for (const int masked : mine.masked) {
      if (own ? !lone() : !has(guilty(), masked)) {
        blame(Violation::Kind::split, fmt::format("rank {} is masked", masked));
      }
    }
  }

  /// Those that have made all calls mask the same ranks.
  void judge_survivors() {
    const Outcome* first = nullptr;
    for (rank_ = 0; rank_ < plan_.ranks; ++rank_) {
      const Outcome& mine = outcome(rank_);
      if (!mine.completed || (rank_ == plan_.rank && !plan_.may_survive_own_fault())) continue;
      if (first == nullptr) first = &mine;
      if (mine.masked != first->masked) {
        blame(Violation::Kind::split, fmt::format("another survivor masks {}", fmt::join(first->masked, " ")));
      }
    }
  }

  void note_time(double waited) {
    result_.slowest = std::max(result_.slowest, waited / deadline_s_);
    // A wait may begin when another one has ended: of the call before, or of a rank that this one waits for. And then
    // ranks tell each other for whom they have waited.
    if (waited > 2.5 * deadline_s_ + test::scaled(1)) {
      blame(Violation::Kind::late, fmt::format("{:.2f} s with a deadline of {:.2f} s", waited, deadline_s_));
    }
  }

  /// The ranks that others may name.
  std::vector<int> guilty() const {
    switch (plan_.fault) {
      case Fault::none:
      case Fault::delay:
        return {};
      case Fault::nic:
        return {plan_.rank, plan_.peer};
      default:
        return {plan_.rank};
    }
  }
  /// Nobody answers the rank of this fault any more, so it may name anybody.
  bool lone() const {
    return plan_.fault == Fault::pause || plan_.fault == Fault::suspend || plan_.fault == Fault::freeze ||
           plan_.fault == Fault::nic;
  }

  std::vector<const char*> allowed(bool own) const {
    switch (plan_.fault) {
      case Fault::stop:
      case Fault::freeze:
      case Fault::pause:
      case Fault::kill:
      case Fault::suspend:
        return plan_.masking && !own ? std::vector<const char*>{} : std::vector{"TimeoutError"};
      case Fault::nic:
        // Whom the NIC does not reach is accused, and told so.
        if (plan_.masking) return own || rank_ == plan_.peer ? std::vector{"TimeoutError"} : std::vector<const char*>{};
        return own ? std::vector{"SystemError", "TimeoutError"} : std::vector{"TimeoutError"};
      case Fault::memory:
        if (own) return {"OutOfMemory"};
        // It fails in the middle of a call that others are in, or leaves before.
        return plan_.masking ? std::vector<const char*>{} : std::vector{"RankMismatch", "TimeoutError"};
      case Fault::set_up:
        return own ? std::vector{"OutOfMemory"} : std::vector{"SystemError"};
      case Fault::bootstrap:
        return {"TimeoutError"};
      default:
        return {};
    }
  }

  void judge_error(const Outcome& mine, bool own) {
    const auto classes = allowed(own);
    if (std::find(classes.begin(), classes.end(), mine.error) == classes.end()) {
      // A rank that is slow, or blamed wrongly, ends calls that nothing is wrong with.
      blame(mine.error == "TimeoutError" ? Violation::Kind::blame : Violation::Kind::error, "not a specified error");
      return;
    }
    if (mine.error == "TimeoutError") {
      if (own || has_gone_on(mine)) return;
      // The rank that all have masked is told so.
      if (has(guilty(), rank_) && mine.text.starts_with(fmt::format("rank {} is masked", rank_))) return;
      const std::vector<int> named = named_in(mine.text);
      auto who = guilty();
      for (int r = 0; r < plan_.ranks; ++r) {  // who has failed in an earlier call is not there either
        if (!outcome(r).error.empty() && outcome(r).step < mine.step) who.push_back(r);
      }
      const bool right = !named.empty() && std::all_of(named.begin(), named.end(), [&](int r) { return has(who, r); });
      if (!right)
        blame(Violation::Kind::blame, fmt::format("names {}, not {}", fmt::join(named, " "), fmt::join(who, " ")));
    } else if (mine.error == "SystemError") {
      const int rank = plan_.fault == Fault::nic ? plan_.peer : plan_.rank;
      if (mine.text.find(fmt::format("rank {}", rank)) == std::string::npos) {
        blame(Violation::Kind::blame, fmt::format("does not name rank {}", rank));
      }
    }
  }

  /// Has the rank that stood still gone on within the same call, and found its own waits over? Then it tells for whom
  /// it has waited like everybody else, and in a circle of such waits nobody is silent: ranks name whom they waited
  /// for.
  bool has_gone_on(const Outcome& mine) const {
    const Outcome& late = outcome(plan_.rank);
    return (plan_.fault == Fault::pause || plan_.fault == Fault::suspend) && late.error == "TimeoutError" &&
           late.step == mine.step;
  }

  /// Of the ranks whose fault it is not.
  std::string summary() const {
    std::string worst = "completed";
    for (int r = 0; r < plan_.ranks; ++r) {
      const Outcome& one = outcome(r);
      if (!one.error.empty() && (r != plan_.rank || worst == "completed")) worst = one.error;
      if (!one.masked.empty() && worst == "completed") worst = "masked";
    }
    return worst;
  }

  const Plan& plan_;
  const std::vector<Outcome>& outcomes_;
  const double deadline_s_;
  const bool reached_;
  int rank_ = 0;
  Verdict result_;
};

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

}  // namespace

const char* name_of(Violation::Kind kind) {
  constexpr const char* kNames[kViolations] = {"wrong result", "wrong error", "wrong rank", "split group",
                                               "late",         "leak",        "next buffer"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::string class_of(const std::exception& error) {
  if (dynamic_cast<const RankMismatch*>(&error) != nullptr) return "RankMismatch";
  if (dynamic_cast<const InvalidArgument*>(&error) != nullptr) return "InvalidArgument";
  if (dynamic_cast<const OutOfMemory*>(&error) != nullptr) return "OutOfMemory";
  if (dynamic_cast<const TimeoutError*>(&error) != nullptr) return "TimeoutError";
  if (dynamic_cast<const UseAfterDestroy*>(&error) != nullptr) return "UseAfterDestroy";
  if (dynamic_cast<const SystemError*>(&error) != nullptr) return "SystemError";
  return dynamic_cast<const Error*>(&error) != nullptr ? "Error" : "exception";
}

std::string Outcome::describe() const {
  if (!error.empty()) return fmt::format("{} in call {} after {:.2f} s: {}", error, step, waited, text);
  return fmt::format("{}, masks: {}", completed ? "completed" : "did not complete", fmt::join(masked, " "));
}

std::string Outcome::write() const {
  return fmt::format("{} {} {} {} {}\n{}\n{}\n{}\n{}\n{}\n", reached ? 1 : 0, completed ? 1 : 0, step, waited,
                     masked.size(), fmt::join(masked, " "), error, one_line(text), one_line(wrong),
                     one_line(left_over));
}

Outcome Outcome::read(const std::string& lines) {
  std::istringstream in(lines);
  Outcome one;
  std::size_t masks = 0;
  in >> one.reached >> one.completed >> one.step >> one.waited >> masks;
  for (int rank; masks > 0 && in >> rank; --masks) one.masked.push_back(rank);
  std::string rest;
  if (one.masked.empty()) std::getline(in, rest);
  std::getline(in, rest);
  for (std::string* line : {&one.error, &one.text, &one.wrong, &one.left_over}) std::getline(in, *line);
  return one;
}

Verdict judge(const Plan& plan, const std::vector<Outcome>& outcomes, const std::string& next, double deadline_s) {
  Verdict verdict = Judge(plan, outcomes, deadline_s).verdict();
  for (const Outcome& one : outcomes) verdict.ranks.push_back(one.describe());
  if (!next.empty()) verdict.violations.push_back({Violation::Kind::next, next});
  return verdict;
}

}  // namespace deep_ep::faults
