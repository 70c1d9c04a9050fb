// Which interface calls leave by: the grammar of NCCL, NVSHMEM and Gloo, and a call on this machine.
#include "csrc/bootstrap/interfaces.hpp"

#include <gtest/gtest.h>
#include <netinet/in.h>

#include <thread>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/unique_fd.hpp"
#include "tests/bootstrap/free_port.hpp"
#include "tests/support/setting.hpp"
#include "tests/support/variables.hpp"
#include "tools/common/socket_bootstrap.hpp"

namespace deep_ep {
namespace {

InterfaceAddress at(const std::string& interface, int family) {
  InterfaceAddress address{.interface = interface};
  address.address.ss_family = static_cast<sa_family_t>(family);
  return address;
}

const std::vector<InterfaceAddress> kHost = {at("docker0", AF_INET), at("eth0", AF_INET), at("eth0", AF_INET6),
                                             at("eth1", AF_INET),    at("ib0", AF_INET6), at("lo", AF_INET)};

/// "eth0", of the address that a call by IPv4 leaves from; "-" where the system decides.
std::string leaves_by(const Variables& variables, int family = AF_INET) {
  const InterfaceAddress* address = read_socket_choice(source_of(variables)).find(kHost, family);
  return address == nullptr ? "-" : address->interface;
}

TEST(Interfaces, NamesAreBeginningsUnlessExact) {
  EXPECT_EQ(leaves_by({}), "-");
  EXPECT_EQ(leaves_by({{"DEEP_EP_SOCKET_IFNAME", "eth"}}), "eth0");
  EXPECT_EQ(leaves_by({{"DEEP_EP_SOCKET_IFNAME", "=eth"}}), "-");
  EXPECT_EQ(leaves_by({{"DEEP_EP_SOCKET_IFNAME", "=eth1"}}), "eth1");
  EXPECT_EQ(leaves_by({{"DEEP_EP_SOCKET_IFNAME", "wlan,ib"}}), "-");
  EXPECT_EQ(leaves_by({{"DEEP_EP_SOCKET_IFNAME", "wlan, ib"}}, AF_INET6), "ib0");
  EXPECT_EQ(leaves_by({{"DEEP_EP_SOCKET_IFNAME", "^docker"}}), "eth0");
  EXPECT_EQ(leaves_by({{"DEEP_EP_SOCKET_IFNAME", "^=docker,eth0"}}), "docker0");
  EXPECT_EQ(leaves_by({{"DEEP_EP_SOCKET_IFNAME", "^docker,eth"}}), "lo");
}

TEST(Interfaces, TheFirstVariableCounts) {
  Variables variables = {{"GLOO_SOCKET_IFNAME", "eth1"}};
  EXPECT_EQ(leaves_by(variables), "eth1");
  variables["GLOO_SOCKET_IFNAME"] = "eth";
  EXPECT_EQ(leaves_by(variables), "-") << "Gloo's names are whole";
  variables["NCCL_SOCKET_IFNAME"] = "docker";
  EXPECT_EQ(leaves_by(variables), "docker0");
  variables["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] = "lo";
  EXPECT_EQ(leaves_by(variables), "lo");
  variables["DEEP_EP_SOCKET_IFNAME"] = "eth1";
  EXPECT_EQ(leaves_by(variables), "eth1");
  EXPECT_EQ(read_socket_choice(source_of(variables)).variable, "DEEP_EP_SOCKET_IFNAME=eth1");
}

TEST(Interfaces, WrongListsAreRefusedOrIgnored) {
  EXPECT_THROW(leaves_by({{"DEEP_EP_SOCKET_IFNAME", "eth0,,eth1"}}), InvalidArgument);
  EXPECT_THROW(leaves_by({{"DEEP_EP_SOCKET_FAMILY", "IPv4"}}), InvalidArgument);
  EXPECT_EQ(leaves_by({{"NCCL_SOCKET_IFNAME", "^"}, {"GLOO_SOCKET_IFNAME", "eth1"}}), "eth1");
}

/// The source address that a call to `to` is given before it is made; 0: the system decides.
std::uint32_t source_of_call(std::uint32_t to, const char* interfaces) {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in target = test::loopback(9);
  target.sin_addr.s_addr = htonl(to);
  addrinfo call{};
  call.ai_family = AF_INET;
  call.ai_addr = reinterpret_cast<sockaddr*>(&target);
  call.ai_addrlen = sizeof target;
  leave_by_chosen_interface(socket.get(), call, read_socket_choice(source_of({{"NCCL_SOCKET_IFNAME", interfaces}})));
  sockaddr_in bound{};
  socklen_t size = sizeof bound;
  EXPECT_EQ(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound), &size), 0);
  return ntohl(bound.sin_addr.s_addr);
}

TEST(Interfaces, ASocketIsBoundToTheAddressUnlessTheRouteIsAllowedAnyway) {
  constexpr std::uint32_t kElsewhere = 0xc0000201;  // 192.0.2.1, of no network: no route to it begins at loopback
  EXPECT_EQ(source_of_call(kElsewhere, "=lo"), std::uint32_t{INADDR_LOOPBACK});
  EXPECT_EQ(source_of_call(INADDR_LOOPBACK, "=lo"), 0u);
  EXPECT_EQ(source_of_call(INADDR_LOOPBACK, "^no_such_interface"), 0u);
}

TEST(Interfaces, RanksMeetWhateverIsNamed) {
  for (const char* value : {"=lo", "no_such_interface"}) {
    const Setting setting("NCCL_SOCKET_IFNAME", value);
    const Setting family("DEEP_EP_SOCKET_FAMILY", "AF_INET");
    const std::uint16_t port = test::free_port();
    int sum = 0;
    std::thread other([&] {
      const auto bootstrap = make_socket_bootstrap(1, 2, "127.0.0.1", port, 120);
      all_gather_values(*bootstrap, 2);
    });
    const auto bootstrap = make_socket_bootstrap(0, 2, "", port, 120);
    for (const int one : all_gather_values(*bootstrap, 1)) sum += one;
    other.join();
    EXPECT_EQ(sum, 3) << value;
  }
}

}  // namespace
}  // namespace deep_ep
