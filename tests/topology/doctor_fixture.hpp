// A machine of files, variables of a test's own, and what the doctor says about both.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/variables.hpp"
#include "tests/topology/fake_machine.hpp"
#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {

class Doctor : public testing::Test {
 protected:
  Patient patient() const {
    std::vector<std::string> names;
    for (const auto& [name, value] : variables_) names.push_back(name);
    Patient patient = examine(machine_.root(), source_of(variables_), names);
    patient.build = {"12.9.86", {"90a-real", "100-real", "90-virtual"}};  // whatever this test program is built for
    return patient;
  }
  Findings findings() const { return run_checks(patient()); }

  /// The findings of one check that are worse than `ok`, one per line: "error: ...".
  std::string complaints(const std::string& check) const {
    std::string text;
    for (const Finding& finding : findings()) {
      if (finding.check != check || finding.verdict == Verdict::ok) continue;
      text += fmt::format("{}{}: {}", text.empty() ? "" : "\n", name_of(finding.verdict), finding.found);
    }
    return text;
  }

  test::FakeMachine machine_;
  Variables variables_;
};

}  // namespace deep_ep::tools
