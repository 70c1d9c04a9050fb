#include "csrc/rdma/connections.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/support/format.hpp"
#include "tests/rdma/messages.hpp"

namespace deep_ep::rdma {
namespace {

using deep_ep::test::message_of;

template <std::size_t n>
void write(std::array<char, n>& field, std::string_view text) {
  field = {};
  std::copy(text.begin(), text.end(), field.begin());
}

/// Ranks that have NICs; `hosts` has a letter for each.
std::vector<WireFacts> ranks(std::string_view hosts) {
  std::vector<WireFacts> all(hosts.size());
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    write(all[rank].process.boot_id, hosts.substr(rank, 1));
    write(all[rank].process.host, std::string("host-") + hosts[rank]);
  }
  return all;
}

struct Chosen {
  WireKind wire;
  std::string why_local;
};
Chosen choose(const std::vector<WireFacts>& facts) {
  Chosen chosen{};
  chosen.wire = choose_wire(facts, chosen.why_local);
  return chosen;
}
std::string refusal(const std::vector<WireFacts>& facts) {
  return message_of<SystemError>([&] { choose(facts); });
}
void want(std::vector<WireFacts>& facts, WireKind wire) {
  for (WireFacts& rank : facts) rank.wanted.kind = wire;
}

TEST(WireChoice, NicsWhereAllHaveThemElseCopiesOnOneHost) {
  EXPECT_EQ(choose(ranks("aaaa")).wire, WireKind::verbs);
  EXPECT_EQ(choose(ranks("aabb")).wire, WireKind::verbs);
  auto facts = ranks("aaa");
  write(facts[1].why_no_nic, "no device");
  const Chosen chosen = choose(facts);
  EXPECT_EQ(chosen.wire, WireKind::local);
  EXPECT_EQ(chosen.why_local, "rank 1 (host host-a): no device");
  facts = ranks("aabb");
  write(facts[3].why_no_nic, "no device");
  EXPECT_EQ(refusal(facts), "rank 3 (host host-b): no device");
}

TEST(WireChoice, WhatWasAskedForIsDoneOrRefused) {
  for (const WireKind wire : {WireKind::local, WireKind::simulated}) {
    const std::string name(name_of(wire));
    auto facts = ranks("aa");
    want(facts, wire);
    EXPECT_EQ(choose(facts).wire, wire);
    const bool local = wire == WireKind::local;
    facts[0].handler = local ? NicHandler::doorbell : NicHandler::cpu;
    EXPECT_EQ(refusal(facts), fmt::format("DEEP_EP_NIC_HANDLER={} is impossible with DEEP_EP_RDMA_WIRE={}: {}",
                                          local ? "doorbell" : "cpu", name, local ? "no NIC" : "kernels ring it"));
    facts = ranks("aab");
    want(facts, wire);
    EXPECT_EQ(refusal(facts), "DEEP_EP_RDMA_WIRE=" + name +
                                  " is impossible: rank 0 (host host-a) and rank 2 (host host-b) are not on one host");
  }
  auto facts = ranks("aa");
  want(facts, WireKind::verbs);
  EXPECT_EQ(choose(facts).wire, WireKind::verbs);
  write(facts[0].why_no_nic, "no device");
  EXPECT_EQ(refusal(facts), "rank 0 (host host-a): no device");
  want(facts, WireKind::automatic);
  facts[1].handler = NicHandler::gpu;
  EXPECT_EQ(refusal(facts), "rank 0 (host host-a): no device") << "a handler `gpu` has nothing to ring otherwise";
}

TEST(WireChoice, RanksMustAgree) {
  auto facts = ranks("aaa");
  facts[2].wanted.kind = WireKind::local;
  EXPECT_EQ(message_of<RankMismatch>([&] { choose(facts); }),
            "DEEP_EP_RDMA_WIRE is auto on rank 0 but local on rank 2; it must be equal on all ranks");
  want(facts, WireKind::simulated);
  facts[1].wanted.nic.latency_us = 5;
  EXPECT_EQ(message_of<RankMismatch>([&] { choose(facts); }),
            "DEEP_EP_RDMA_WIRE is simulated with other keys on rank 0 than on rank 1; they must be equal");
}

/// Peers pair channels by number, so each rank counts on as many NICs as the one with fewest, and on the slowest.
TEST(WireChoice, RanksCountOnNicsThatAllHave) {
  AgreedWire wire;
  wire.ranks = ranks("aabb");
  const int nics[] = {4, 2, 3, 4};
  for (std::size_t rank = 0; rank < wire.ranks.size(); ++rank) {
    wire.ranks[rank].num_nics = nics[rank];
    wire.ranks[rank].bytes_per_ns = 10 * nics[3 - rank];
  }
  wire.nics.resize(4);  // of this rank
  std::string why_local;
  wire.decide(why_local);
  EXPECT_EQ(wire.kind, WireKind::verbs);
  EXPECT_EQ(wire.num_nics, 2);
  EXPECT_EQ(wire.bytes_per_ns, 20);
}

TEST(WireChoice, RanksMustAgreeOnRails) {
  auto facts = ranks("aaa");
  facts[2].rail_only = Choice::yes;
  EXPECT_EQ(message_of<RankMismatch>([&] { choose(facts); }),
            "DEEP_EP_RAIL_ONLY is auto on rank 0 but 1 on rank 2; it must be equal on all ranks");
}

}  // namespace
}  // namespace deep_ep::rdma
