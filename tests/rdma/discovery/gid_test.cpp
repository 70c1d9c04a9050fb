// Which GID of a port is used.
#include "csrc/rdma/discovery/gid.hpp"

#include <gtest/gtest.h>

#include "csrc/rdma/discovery/nics.hpp"
#include "tests/topology/fake_machine.hpp"

namespace deep_ep::rdma {
namespace {

constexpr const char* kZero = "0000:0000:0000:0000:0000:0000:0000:0000";
constexpr const char* kEmptySlot = "fe80:0000:0000:0000:0000:0000:0000:0000";
constexpr const char* kLocal = "fe80:0000:0000:0000:4201:0aff:fe00:0001";
constexpr const char* kIpv4 = "0000:0000:0000:0000:0000:ffff:0a01:0203";
constexpr const char* kIpv4b = "0000:0000:0000:0000:0000:ffff:c0a8:0005";
constexpr const char* kSelfAssigned = "0000:0000:0000:0000:0000:ffff:a9fe:0102";
constexpr const char* kGlobal = "2001:0db8:0000:0000:0000:0000:0000:0001";
constexpr const char* kV1 = "IB/RoCE v1";
constexpr const char* kV2 = "RoCE v2";

struct GidCase {
  const char* name;
  std::vector<test::FakeGid> gids;
  std::optional<environment::Value> index;
  std::optional<int> chosen;
  const char* problem = "";
  const char* link_layer = "Ethernet";
};

environment::Value index(int value, bool binding) {
  return {std::to_string(value), binding ? "DEEP_EP_INDEX" : "GID_INDEX"};
}

class GidSelection : public testing::TestWithParam<GidCase> {};

// Through sysfs, so that reading the table is under test as well.
TEST_P(GidSelection, Chooses) {
  const GidCase& test = GetParam();
  const test::FakeMachine machine;
  test::FakeNic nic;
  nic.name = "nic";
  nic.link_layer = test.link_layer;
  nic.gids = test.gids;
  machine.add_nic(nic);
  const std::vector<Nic> nics = find_nics(machine.root());
  ASSERT_EQ(nics.size(), 1u);
  const NicPort& port = nics[0].ports.at(0);
  const GidChoice choice = choose_gid(port, test.index.value_or(environment::Value{"auto", {}}));
  EXPECT_EQ(choice.gid ? std::optional(choice.gid->index) : std::nullopt, test.chosen);
  EXPECT_EQ(choice.problem, test.problem);
}

const auto kTable = test::roce_gids("0a01:0203");

INSTANTIATE_TEST_SUITE_P(
    Gids, GidSelection,
    testing::Values(
        GidCase{"TheUsualTable", kTable, {}, 3},
        GidCase{"Ipv4BeforeAnEarlierIpv6", {{kGlobal, kV2}, {kIpv4, kV2}}, {}, 1},
        GidCase{"GlobalIpv6WithoutIpv4", {{kLocal, kV2}, {kIpv4, kV1}, {kGlobal, kV2}}, {}, 2},
        GidCase{"SelfAssignedIpv4AfterGlobalIpv6", {{kSelfAssigned, kV2}, {kGlobal, kV2}}, {}, 1},
        GidCase{"SelfAssignedIpv4Alone", {{kLocal, kV2}, {kSelfAssigned, kV1}, {kSelfAssigned, kV2}}, {}, 2},
        GidCase{"TheLowestOfSeveral", {{kIpv4b, kV2}, {kIpv4, kV2}}, {}, 0},
        GidCase{"HolesInTheTable", {{kZero, ""}, {kZero, ""}, {kZero, ""}, {kZero, ""}, {kIpv4, kV2}}, {}, 4},
        GidCase{"ZeroGids", {{kZero, ""}, {kZero, kV2}, {kEmptySlot, kV2}}, {}, {}, "all GIDs are zero"},
        GidCase{
            "LinkLocalOnly",
            {{kLocal, kV1}, {kLocal, kV2}},
            {},
            {},
            "no RoCE v2 GID with a routable address; there is GID 0 (IB/RoCE v1, fe80::4201:aff:fe00:1, eth1), GID 1 "
            "(RoCE v2, fe80::4201:aff:fe00:1, eth1)"},
        GidCase{"TypeNotVisibleInAContainer",
                {{kIpv4, ""}},
                {},
                {},
                "no RoCE v2 GID with a routable address; there is GID 0 (unknown type, 10.1.2.3)"},
        GidCase{"TheIndexWins", kTable, index(2, true), 2}, GidCase{"AnIndexMayBeLinkLocal", kTable, index(1, true), 1},
        GidCase{"AnIndexOfAZeroGid",
                kTable,
                index(4, true),
                {},
                "DEEP_EP_INDEX=4: no GID is there (zero, or beyond the table)"},
        GidCase{"AnAliasThatDoesNotFit", kTable, index(77, false), 3,
                "GID_INDEX=77: no GID is there (zero, or beyond the table); GID 3 is used instead"},
        GidCase{"InfiniBandUsesItsFirst", {{kLocal, kV1}, {kGlobal, kV1}}, {}, 0, "", "InfiniBand"},
        GidCase{"InfiniBandByIndex", {{kLocal, kV1}, {kGlobal, kV1}}, index(1, true), 1, "", "InfiniBand"}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace deep_ep::rdma
