// `deep_ep doctor --quick`, and the list of all checks.
#include "tools/doctor/quick.hpp"

#include <chrono>
#include <set>

#include "tests/topology/doctor_fixture.hpp"
#include "tools/doctor/catalogue.hpp"

namespace deep_ep::tools {
namespace {

TEST_F(Doctor, QuickAnswersInOneLine) {
  write_healthy_machine(machine_);
  const QuickAnswer answer = answer_quickly(patient(), {.gpus = 8, .nics = 8});
  EXPECT_TRUE(answer.usable);
  EXPECT_EQ(answer.line, "usable: 8 GPUs, 8 RDMA devices, 0 warnings");
}

TEST_F(Doctor, QuickNamesWhatIsWrong) {
  write_healthy_machine(machine_);
  machine_.write("/sys/class/infiniband/mlx5_5/ports/1/state", "1: DOWN");
  machine_.write("/sys/class/infiniband/mlx5_5/ports/1/phys_state", "3: Disabled");
  EXPECT_EQ(answer_quickly(patient(), {}).line, "not usable: D4 mlx5_5 port 1 is DOWN (link: Disabled)");
}

TEST_F(Doctor, QuickCountsWhatIsExpected) {
  EXPECT_TRUE(answer_quickly(patient(), {}).usable) << "one machine without GPUs: the CPU executor works";
  EXPECT_EQ(answer_quickly(patient(), {.gpus = 8, .nics = 2}).line,
            "not usable: 0 GPUs are here, --gpus 8 expected; 0 RDMA devices are usable here, --nics 2 expected");
  write_healthy_machine(machine_);
  EXPECT_FALSE(answer_quickly(patient(), {.gpus = 9}).usable);
}

TEST_F(Doctor, QuickReadsNoLibraries) {
  write_healthy_machine(machine_);
  for (const Finding& finding : answer_quickly(patient(), {}).findings) EXPECT_NE(finding.check, "libraries");
}

TEST(DoctorChecks, AreNumberedInOrderAndExplained) {
  int last = 0;
  std::set<std::string_view> titles;
  for (const Check& check : all_checks()) {
    ASSERT_EQ(check.id[0], 'D');
    const int number = std::stoi(std::string(check.id.substr(1)));
    EXPECT_GT(number, last);
    last = number;
    EXPECT_TRUE(titles.insert(check.title).second) << check.title;
    EXPECT_TRUE(check.meaning.starts_with("so that ")) << check.id;
    EXPECT_EQ(check.run == nullptr, check.cost == Check::Cost::command) << check.id;
  }
}

}  // namespace
}  // namespace deep_ep::tools
