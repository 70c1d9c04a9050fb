// What the NIC test finds.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace deep_ep::rdma::nic_test {

enum class Outcome : std::uint8_t { pass, skip, fail };

/// One line of the report.
struct Line {
  std::string check;  ///< a word that scripts may rely on: "entries", "way", "nic", ...
  Outcome outcome = Outcome::pass;
  std::string found;    ///< what was seen, with figures; of a check that was left out, why
  std::string meaning;  ///< of a failure: what that does to a run
  std::string action;   ///< of a failure: what to do
};

using Lines = std::vector<Line>;

}  // namespace deep_ep::rdma::nic_test
