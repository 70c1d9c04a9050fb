// `deep_ep env` as a script: on machines that exist as files, against files of what must come out, in golden/.
// With DEEP_EP_TEST_WRITE_GOLDEN=1 the files are written anew: look at what changed.
#include "tools/env/env.hpp"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
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

void compare(const std::string& name, const std::string& text) {
  const std::filesystem::path file = std::filesystem::path(DEEP_EP_GOLDEN_FOLDER) / name;
  if (::getenv("DEEP_EP_TEST_WRITE_GOLDEN") != nullptr) std::ofstream(file) << text;
  std::stringstream expected;
  expected << std::ifstream(file).rdbuf();
  EXPECT_EQ(text, expected.str()) << "compare with " << file;
}

const Assignment& row(const Environment& environment, std::string_view name) {
  for (const Assignment& assignment : environment.own) {
    if (assignment.name == name) return assignment;
  }
  throw std::runtime_error("no row " + std::string(name));
}

TEST(EnvScript, OfGoogleA4) {
  test::FakeMachine machine;
  test::write_healthy_machine(machine);
  const Profile& profile = profile_of("gke-a4");
  const Environment environment = environment_of(patient_of(machine), &profile, true);
  compare("env_a4.sh", to_shell(environment, &profile));
  compare("env_a4.yaml", to_yaml(environment, &profile, false));
}

TEST(EnvScript, TheScriptOfThePluginWins) {
  test::FakeMachine machine;
  test::write_healthy_machine(machine);
  machine.write("/usr/local/gib/scripts/set_nccl_env.sh", "export NCCL_NET=gIB");
  const Profile& profile = profile_of("gke-a4");
  const Environment environment = environment_of(patient_of(machine, {{"NCCL_CROSS_NIC", "2"}}), &profile, true);
  EXPECT_NE(to_shell(environment, &profile).find(". '/usr/local/gib/scripts/set_nccl_env.sh'"), std::string::npos);
  EXPECT_NE(to_yaml(environment, &profile, false).find("set_nccl_env.sh is there and wins"), std::string::npos);
}

TEST(EnvScript, OfGoogleA3Ultra) {
  test::FakeMachine machine;
  test::write_healthy_machine(machine, {.model = "NVIDIA H200"});
  const Profile& profile = profile_of("gke-a3u");
  const auto names = [&] {
    std::string text;
    for (const Assignment& one : environment_of(patient_of(machine), &profile, true).nccl) text += one.name + " ";
    return text;
  };
  EXPECT_EQ(names(), "NCCL_NET NCCL_CROSS_NIC NCCL_NET_GDR_LEVEL LD_LIBRARY_PATH ");
  EXPECT_EQ(row(environment_of(patient_of(machine), &profile, true), "DEEP_EP_RDMA_WIRE").value, "verbs");
}

TEST(EnvScript, ThePluginIsOnTheLoadersPath) {
  test::FakeMachine machine;
  const auto path = [&](const Variables& variables, const char* profile) {
    for (const Assignment& one : environment_of(patient_of(machine, variables), &profile_of(profile), true).nccl) {
      if (one.name == "LD_LIBRARY_PATH") return one.value;
    }
    return std::string("not set");
  };
  EXPECT_EQ(path({}, "gke-a4"), "/usr/local/nvidia/lib64:/usr/local/gib/lib64");
  EXPECT_EQ(path({{"LD_LIBRARY_PATH", "/mine"}}, "gke-a3u"), "/mine:/usr/local/gib/lib64");
  EXPECT_EQ(path({{"LD_LIBRARY_PATH", "/usr/local/gib/lib64:/mine"}}, "gke-a4"), "/usr/local/gib/lib64:/mine");
}

TEST(EnvScript, OfAMachineWithoutAnything) {
  test::FakeMachine machine;
  const Environment nothing = environment_of(patient_of(machine), nullptr, false);
  EXPECT_TRUE(to_yaml(nothing, nullptr, false).ends_with("\n[]\n"));
  EXPECT_TRUE(to_yaml(nothing, nullptr, true).ends_with("\nworkload:\n  env: {}\n"));
}

TEST(EnvScript, AGpuWithoutANicLeavesNoMapping) {
  test::FakeMachine machine;
  test::write_healthy_machine(machine, {.with_nics = false});
  const Environment environment = environment_of(patient_of(machine), nullptr, false);
  EXPECT_EQ(row(environment, "DEEP_EP_DEVICE_TO_HCA_MAPPING").origin, Origin::standard);
  EXPECT_FALSE(environment.notes.empty());
}

TEST(EnvScript, WhatIsSetWinsOverTheProfile) {
  test::FakeMachine machine;
  const Profile& profile = profile_of("gke-a4");
  const Variables own = {{"DEEP_EP_RDMA_TRAFFIC_CLASS", "7"}, {"NCCL_IB_TC", "8"}};
  EXPECT_EQ(row(environment_of(patient_of(machine, own), &profile, false), "DEEP_EP_RDMA_TRAFFIC_CLASS").value, "7");
  EXPECT_EQ(row(environment_of(patient_of(machine, {{"NCCL_IB_TC", "8"}}), &profile, false), "NCCL_IB_TC").value, "8");
  EXPECT_EQ(row(environment_of(patient_of(machine), &profile, false), "DEEP_EP_RDMA_TRAFFIC_CLASS").value, "52");
}

TEST(EnvScript, AWrongVariableIsNotPassedOn) {
  test::FakeMachine machine;
  for (const char* name : {"DEEP_EP_RDMA_TRAFFIC_CLASS", "DEEP_EP_TIMEOUT_S", "DEEP_EP_DEVICE_TO_HCA_MAPPING"}) {
    try {
      environment_of(patient_of(machine, {{name, "nonsense"}}), nullptr, false);
      ADD_FAILURE() << name << " was accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
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
