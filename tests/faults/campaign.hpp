// Many runs, side by side: waiting for deadlines costs little.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/faults/outcome.hpp"

namespace deep_ep::faults {

/// Does that fail a test? Reports count everything. Under sanitizers, ranks are too slow to be told from those that are
/// lost.
bool fails_a_test(Violation::Kind kind);

struct CampaignOptions {
  std::uint64_t first_seed = 1;
  int runs = 1000;
  std::optional<Fault> only = {};  ///< this kind alone
  bool progress = false;           ///< to standard error
};

/// What the process holds when no run is under way.
struct Holdings {
  long threads = 0, files = 0, heaps = 0, resident_kib = 0;
  static Holdings now();
  /// More than before of what must not grow; empty if nothing.
  std::string more_than(const Holdings& before) const;
  std::string describe() const;
};

struct Campaign {
  struct Failure {
    Fault fault;
    std::uint64_t seed;
    Violation violation;
    bool again;  ///< also when it was repeated with much longer deadlines
  };
  int runs = 0;
  double seconds = 0;
  double deadline_s = 0;
  std::array<std::map<std::string, int>, kFaults> outcomes;  ///< by what happened
  std::array<double, kFaults> slowest{};                     ///< time to an error, in deadlines
  std::vector<Failure> failures;
  Holdings begin, end;
  std::string leaks;

  /// What fails a test: what came again, and leaks.
  std::string verdict() const;
  /// A line for each kind of fault, and each finding.
  std::string report() const;
};

Campaign run_campaign(const CampaignOptions& options);

}  // namespace deep_ep::faults
