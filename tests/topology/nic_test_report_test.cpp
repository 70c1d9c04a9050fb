// What `deep_ep doctor --nic-test` makes of its arguments and prints of its findings; what it finds: ../rdma/nic_test.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "deep_ep/error.hpp"
#include "tests/support/variables.hpp"
#include "tests/topology/fake_machine.hpp"
#include "tools/doctor/nic_test/nic_test.hpp"
#include "tools/doctor/nic_test/subjects.hpp"

namespace deep_ep::tools {
namespace {

using rdma::nic_test::Outcome;

std::string peer_text(const std::string& text) {
  const PeerAddress peer = parse_peer(text);
  return peer.host + " " + std::to_string(peer.port);
}

TEST(NicTestPeer, IsAHostAndMayHaveAPort) {
  const std::string port = " " + std::to_string(kNicTestPort);
  EXPECT_EQ(peer_text("node7"), "node7" + port);
  EXPECT_EQ(peer_text("10.0.0.7:123"), "10.0.0.7 123");
  EXPECT_EQ(peer_text("fe80::1"), "fe80::1" + port);
  EXPECT_EQ(peer_text("[fe80::1]:123"), "fe80::1 123");
  EXPECT_EQ(parse_peer("node7", 99).port, 99);
  EXPECT_EQ(parse_peer("node7:5", 99).port, 5);
  for (const char* wrong : {"", ":1", "node7:", "node7:0", "node7:65536", "node7:1x", "[]:1"}) {
    EXPECT_THROW(parse_peer(wrong), InvalidArgument) << wrong;
  }
}

TEST(NicTestReport, SaysOfFailuresWhatTheyMean) {
  NicTestReport report;
  report.nics.push_back({"mlx5_0:1, rung by GPU 0",
                         {{"entries", Outcome::pass, "all right", "", ""},
                          {"litmus", Outcome::fail, "found", "meant", "do"},
                          {"wrong_key", Outcome::skip, "cannot", "", ""}}});
  report.log = {"info: heap", "warn: rings in host memory", "error: on purpose", "warn: rings in host memory"};
  const std::string text = report.text();
  EXPECT_NE(text.find("\nmlx5_0:1, rung by GPU 0\n"
                      "  PASS entries     all right\n"
                      "  FAIL litmus      found\n"
                      "       meaning: meant\n"
                      "       to do:   do\n"
                      "  SKIP wrong_key   cannot\n"
                      "\nwarn: rings in host memory\n"
                      "\n1 passed, 1 failed, 1 skipped\n"),
            std::string::npos)
      << text;
  EXPECT_FALSE(report.well());
  const nlohmann::json json = report.json();
  EXPECT_EQ(json["failed"], 1);
  EXPECT_EQ(json["well"], false);
  EXPECT_EQ(json["nics"][0]["lines"][1]["verdict"], "FAIL");
  EXPECT_EQ(json["nics"][0]["lines"][1]["action"], "do");
  EXPECT_EQ(json["warnings"], (nlohmann::json{"warn: rings in host memory"}));
}

TEST(NicTestSubjects, WithoutANicTheLocalWireIsTestedAndThatIsSaid) {
  test::FakeMachine machine;
  const Patient patient = examine(machine.root(), source_of(Variables{}), {});
  const Subjects found = find_subjects(patient, {.device = "cpu"});
  ASSERT_EQ(found.subjects.size(), 1u);
  EXPECT_EQ(found.subjects[0].name, "wire local (no NIC), CPU");
  ASSERT_EQ(found.left_out.size(), 1u);
  EXPECT_EQ(found.left_out[0].outcome, Outcome::skip);
  EXPECT_NE(found.left_out[0].found.find("has no RDMA device"), std::string::npos);
}

TEST(NicTestSubjects, EveryNicThatCanBeUsedIsTestedAndTheOthersAreNamed) {
  test::FakeMachine machine;
  write_healthy_machine(machine);
  machine.write("/sys/class/infiniband/mlx5_3/ports/1/state", "1: DOWN\n");
  const Patient patient = examine(machine.root(), source_of(Variables{}), {});
  const Subjects found = find_subjects(patient, {.device = "cpu"});
  EXPECT_EQ(found.subjects.size(), 7u);
  EXPECT_EQ(found.subjects[0].name, "mlx5_0:1, rung by the CPU");
  EXPECT_TRUE(found.subjects[0].others.empty());
  EXPECT_FALSE(found.subjects[0].wants_gpu_handler);
  ASSERT_EQ(found.left_out.size(), 1u);
  EXPECT_EQ(found.left_out[0].found.substr(0, 6), "mlx5_3");
}

}  // namespace
}  // namespace deep_ep::tools
