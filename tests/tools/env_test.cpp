// `deep_ep env` as a script: on machines that exist as files.
#include "tools/env/env.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "tests/support/variables.hpp"
#include "tests/topology/fake_machine.hpp"

namespace deep_ep::tools {
namespace {

Patient patient_of(const test::FakeMachine& machine, const Variables& variables = {}) {
  std::vector<std::string> names;
  for (const auto& [name, value] : variables) names.push_back(name);
  return examine(machine.root(), source_of(variables), names);
}

Assignment row(const Patient& patient, std::string_view name) {
  for (const Assignment& assignment : assignments_of(patient)) {
    if (assignment.name == name) return assignment;
  }
  throw std::runtime_error("no row " + std::string(name));
}

TEST(EnvScript, OfAMachineWithGpusAndNics) {
  test::FakeMachine machine;
  test::write_healthy_machine(machine);
  const std::string text = to_shell(patient_of(machine, {{"NCCL_IB_TC", "52"}}));
  EXPECT_NE(text.find("\n# stands for DEEP_EP_RDMA_TRAFFIC_CLASS\nexport NCCL_IB_TC='52'\n"), std::string::npos)
      << text;
  EXPECT_NE(text.find("\nexport DEEP_EP_DEVICE_TO_HCA_MAPPING='0:mlx5_0:1,1:mlx5_1:1,"), std::string::npos) << text;
  EXPECT_EQ(text.find("DEEP_EP_TIMEOUT_S"), std::string::npos) << text;
}

TEST(EnvScript, AGpuWithoutANicLeavesNoMapping) {
  test::FakeMachine machine;
  test::write_healthy_machine(machine, {.with_nics = false});
  const Patient patient = patient_of(machine);
  EXPECT_EQ(row(patient, "DEEP_EP_DEVICE_TO_HCA_MAPPING").source, "default");
  EXPECT_NE(to_shell(patient).find("\n# Note: GPU 0 "), std::string::npos) << to_shell(patient);
}

TEST(EnvScript, OwnVariablesWin) {
  test::FakeMachine machine;
  const Patient patient = patient_of(machine, {{"DEEP_EP_RDMA_TRAFFIC_CLASS", "7"}, {"NCCL_IB_TC", "8"}});
  EXPECT_EQ(row(patient, "DEEP_EP_RDMA_TRAFFIC_CLASS").text, "7");
  EXPECT_EQ(to_shell(patient).find("NCCL_IB_TC"), std::string::npos);
}

TEST(EnvScript, VariablesKeepTheirOwnWords) {
  test::FakeMachine machine;
  const std::string text = to_shell(patient_of(machine, {{"NVSHMEM_IB_DISABLE_DMABUF", "1"}}));
  EXPECT_NE(text.find("\nexport NVSHMEM_IB_DISABLE_DMABUF='1'\n"), std::string::npos) << text;
}

TEST(EnvScript, AWrongVariableIsNotPassedOn) {
  test::FakeMachine machine;
  for (const char* name :
       {"DEEP_EP_RDMA_TRAFFIC_CLASS", "DEEP_EP_TIMEOUT_S", "DEEP_EP_DEVICE_TO_HCA_MAPPING", "DEEP_EP_CONTROL_PORTS"}) {
    const Patient patient = patient_of(machine, {{name, "nonsense"}});
    EXPECT_NE(row(patient, name).problem.find(name), std::string::npos) << row(patient, name).problem;
    EXPECT_THROW(to_shell(patient), InvalidArgument) << name;
  }
}

TEST(EnvScript, TextsAreQuoted) {
  EXPECT_EQ(quoted_for_shell("it's $HOME"), R"('it'\''s $HOME')");
  EXPECT_EQ(quoted_for_shell(""), "''");
}

TEST(EnvReference, EveryVariableOfOthersStandsOnceAndIsExplained) {
  std::set<std::string_view> seen;
  for (const ForeignVariable& row : foreign_variables()) {
    EXPECT_FALSE(std::string_view(row.meaning).empty()) << row.names;
    for (const std::string_view name : split(row.names, ' ')) {
      EXPECT_TRUE(seen.insert(name).second) << name << " is listed twice";
      for (const environment::Variable& variable : environment::variables()) {
        EXPECT_EQ(std::ranges::count(variable.names, name), 0) << name << " is read";
      }
    }
  }
}

}  // namespace
}  // namespace deep_ep::tools
