// Which interfaces may be used: the grammar of NCCL, NVSHMEM and Gloo.
#include "csrc/bootstrap/interfaces.hpp"

#include <gtest/gtest.h>

#include <string>

#include "deep_ep/error.hpp"
#include "tests/support/variables.hpp"

namespace deep_ep {
namespace {

/// "eth0", the first interface that may be used; "-" where all may.
std::string first(const Variables& variables) {
  const SocketChoice choice = read_socket_choice(source_of(variables));
  if (!choice.interfaces.is_set()) return "-";
  for (const char* one : {"docker0", "eth0", "eth1", "ib0", "lo"}) {
    if (choice.interfaces.allows(one)) return one;
  }
  return "none";
}

TEST(Interfaces, NamesAreBeginningsUnlessExact) {
  EXPECT_EQ(first({}), "-");
  EXPECT_EQ(first({{"DEEP_EP_SOCKET_IFNAME", "eth"}}), "eth0");
  EXPECT_EQ(first({{"DEEP_EP_SOCKET_IFNAME", "=eth"}}), "none");
  EXPECT_EQ(first({{"DEEP_EP_SOCKET_IFNAME", "=eth1"}}), "eth1");
  EXPECT_EQ(first({{"DEEP_EP_SOCKET_IFNAME", "wlan, ib"}}), "ib0");
  EXPECT_EQ(first({{"DEEP_EP_SOCKET_IFNAME", "^docker"}}), "eth0");
  EXPECT_EQ(first({{"DEEP_EP_SOCKET_IFNAME", "^=docker,eth0"}}), "docker0");
  EXPECT_EQ(first({{"DEEP_EP_SOCKET_IFNAME", "^docker,eth"}}), "ib0");
}

TEST(Interfaces, AColonBelongsToALabel) {
  EXPECT_EQ(first({{"DEEP_EP_SOCKET_IFNAME", "=eth0:1,eth1"}}), "eth1");
  EXPECT_EQ(first({{"DEEP_EP_SOCKET_IFNAME", "eth0:mgmt,ib"}}), "ib0");
}

TEST(Interfaces, TheFirstVariableCounts) {
  Variables variables = {{"GLOO_SOCKET_IFNAME", "eth1"}};
  EXPECT_EQ(first(variables), "eth1");
  variables["GLOO_SOCKET_IFNAME"] = "eth";
  EXPECT_EQ(first(variables), "none") << "Gloo's names are whole";
  variables["NCCL_SOCKET_IFNAME"] = "docker";
  EXPECT_EQ(first(variables), "docker0");
  variables["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] = "lo";
  EXPECT_EQ(first(variables), "lo");
  variables["DEEP_EP_SOCKET_IFNAME"] = "eth1";
  EXPECT_EQ(first(variables), "eth1");
}

TEST(Interfaces, WrongListsAreRefusedOrIgnored) {
  EXPECT_THROW(first({{"DEEP_EP_SOCKET_IFNAME", "eth0,,eth1"}}), InvalidArgument);
  EXPECT_THROW(first({{"DEEP_EP_SOCKET_FAMILY", "IPv4"}}), InvalidArgument);
  EXPECT_EQ(first({{"NCCL_SOCKET_IFNAME", "^"}, {"GLOO_SOCKET_IFNAME", "eth1"}}), "eth1");
}

}  // namespace
}  // namespace deep_ep
