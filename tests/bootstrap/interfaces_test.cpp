// Which interfaces may be used: the grammar of NCCL, NVSHMEM and Gloo.
#include "csrc/bootstrap/interfaces.hpp"

#include <gtest/gtest.h>
#include <net/if.h>
#include <netinet/in.h>

#include <string>
#include <utility>
#include <vector>

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

/// The interface that others may call, of those that are up, in this order.
std::string called(const std::string& allowed, const std::vector<std::pair<const char*, unsigned>>& flags_of) {
  std::vector<sockaddr_in> addresses(flags_of.size());
  std::vector<ifaddrs> list(flags_of.size());
  for (std::size_t i = list.size(); i-- != 0;) {
    addresses[i].sin_family = AF_INET;
    addresses[i].sin_port = static_cast<in_port_t>(i);
    list[i].ifa_next = i + 1 == list.size() ? nullptr : &list[i + 1];
    list[i].ifa_name = const_cast<char*>(flags_of[i].first);
    list[i].ifa_flags = IFF_UP | flags_of[i].second;
    list[i].ifa_addr = reinterpret_cast<sockaddr*>(&addresses[i]);
  }
  const auto choice = read_socket_choice(source_of({{"DEEP_EP_SOCKET_IFNAME", allowed}}));
  const SocketAddress found = own_address(choice, list.data());
  return found.size == 0 ? "-" : flags_of[reinterpret_cast<const sockaddr_in&>(found.at).sin_port].first;
}

TEST(Interfaces, WhatOtherHostsHardlyReachComesLast) {
  const std::pair<const char*, unsigned> lo{"lo", IFF_LOOPBACK | IFF_RUNNING}, docker{"docker0", IFF_RUNNING},
      without_carrier{"eth0", 0}, runs{"eth1", IFF_RUNNING};
  EXPECT_EQ(called("", {lo, docker, without_carrier, runs}), "eth1");
  EXPECT_EQ(called("docker,eth0", {lo, docker, without_carrier, runs}), "docker0");
  EXPECT_EQ(called("", {lo, docker}), "docker0");
  EXPECT_EQ(called("", {lo, without_carrier}), "eth0");
  EXPECT_EQ(called("", {lo}), "lo");
  EXPECT_EQ(called("ib", {lo, runs}), "-");
}

}  // namespace
}  // namespace deep_ep
