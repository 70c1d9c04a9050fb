// Whether clocks agree: of this machine with the world's, and of two machines with each other.
#pragma once

#include <string>

#include "tools/doctor/report.hpp"

namespace deep_ep {
class Bootstrap;
}

namespace deep_ep::tools {

struct Patient;

/// A part of D14. What the kernel says of its clock; in a copy of files, what the time service has left there.
void check_clock(const Patient& patient, Findings& findings);

/// How far another clock is ahead, and how wrong that number may be.
struct ClockOffset {
  double seconds = 0;
  double error = 0;

  std::string text() const;  ///< "0.412 s ahead (+- 0.001 s)"
  bool matters() const;      ///< more than a second, whatever the error

  static const char* const kMeaning;
  static const char* const kAction;
};
/// Collective, of two ranks on two machines: a few rounds, of which the quickest counts.
ClockOffset compare_clocks(Bootstrap& bootstrap);

}  // namespace deep_ep::tools
