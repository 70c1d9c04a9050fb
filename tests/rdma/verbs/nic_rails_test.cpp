// Requests to NICs on a fabric that connects rails only, with a device that records them.
#include "csrc/rdma/verbs/nic_rails.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "deep_ep/error.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/rdma/verbs/fake_heap.hpp"
#include "tests/rdma/verbs/fake_verbs.hpp"

namespace deep_ep::rdma::verbs {
namespace {

using deep_ep::test::contains;
using deep_ep::test::message_of;

class NicRailsTest : public testing::Test {
 protected:
  ~NicRailsTest() override { EXPECT_EQ(fake_.alive, 0); }
  std::shared_ptr<Device> open() { return Device::open("fake_0", fake_.functions); }
  NicAccess own() {
    NicAccess access;
    access.nic.nic.name = "fake_0";
    access.device = open();
    access.path = path_;
    return access;
  }
  /// Of a rank of nodes of so many.
  LandingNics landing_nics(std::size_t own_rail, std::size_t rails) {
    const NicPlace place{.name = {"fake_0"}, .port = 1, .gid_index = 3};
    return open_landing_nics(own(), own_rail, std::vector(rails, place), heap_);
  }
  void answer(std::uint64_t id, ibv_wc_status status) {
    ibv_wc completion{};
    completion.wr_id = id;
    completion.status = status;
    fake_.completions.push_back(completion);
  }
  static std::string refusal(const std::function<void()>& step) { return message_of<SystemError>(step); }

  test::FakeVerbs fake_;
  test::FakeHeap heap_;
  PathOptions path_{.port = 1, .gid_index = 3};
};

TEST_F(NicRailsTest, APathIsTriedByAWriteOfNoBytes) {
  const auto paths = make_nic_paths(own(), 4);
  EXPECT_NE(paths->address(0).queue_pair, paths->address(1).queue_pair);
  paths->connect(1, paths->address(3));
  answer(std::uint64_t{1} << 32, IBV_WC_SUCCESS);
  paths->reach(1);
  ASSERT_EQ(fake_.posted.size(), 1u);
  EXPECT_EQ(fake_.posted[0].request.opcode, IBV_WR_RDMA_WRITE);
  EXPECT_EQ(fake_.posted[0].request.num_sge, 0);
  EXPECT_LT(fake_.state_changes.back().attributes.timeout, PathOptions{}.ack_timeout) << "it is given up soon";
}

TEST_F(NicRailsTest, APathIntoMemoryIsTriedByAnAdditionOfNothing) {
  const LandingNics nics = landing_nics(0, 2);
  const std::uint32_t key = nics.of_rail[1]->heap.signals.remote_key();
  const auto paths = make_nic_paths(own(), 4, nics);
  EXPECT_EQ(paths->address(1).signal_key, 0u) << "it sends";
  EXPECT_EQ(paths->address(2).signal_key, 0u) << "of the own rail";
  EXPECT_EQ(paths->address(3).signal_key, key);
  paths->connect(3, paths->address(1));
  paths->connect(1, paths->address(3));
  answer(std::uint64_t{1} << 32, IBV_WC_SUCCESS);
  paths->reach(1);
  ASSERT_EQ(fake_.posted.size(), 1u);
  const ibv_send_wr& request = fake_.posted[0].request;
  EXPECT_EQ(request.opcode, IBV_WR_ATOMIC_FETCH_AND_ADD);
  EXPECT_EQ(request.wr.atomic.rkey, key);
  EXPECT_EQ(request.wr.atomic.remote_addr, 0u);
  EXPECT_EQ(request.wr.atomic.compare_add, 0u);
}

TEST_F(NicRailsTest, WhatAPathLacksIsSaid) {
  const auto paths = make_nic_paths(own(), 4);
  paths->connect(0, paths->address(2));
  answer(0, IBV_WC_RETRY_EXC_ERR);
  EXPECT_TRUE(
      contains(refusal([&] { paths->reach(0); }), "RDMA device fake_0:1: a message that tries a path has failed: "));
  fake_.refusals["modify_qp"] = ENETUNREACH;
  EXPECT_TRUE(contains(refusal([&] { paths->connect(1, paths->address(3)); }), "no route to the peer"));
}

/// Rank 4 of nodes of three: it is on rail 1, and receives by the NICs of rails 0 and 2.
TEST_F(NicRailsTest, TheHeapIsRegisteredWithTheNicOfEachOtherRail) {
  const ConnectionOptions options{.peers = {0, 1, 2}, .channels = 2, .rail_width = 3};
  const LandingNics nics = landing_nics(1, 3);
  Landings landings(&nics, 4, options);
  ASSERT_EQ(fake_.registered.size(), 2u);
  for (const auto& heap : fake_.registered) {
    EXPECT_EQ(heap.address, heap_.local());
    EXPECT_EQ(heap.bytes, test::FakeHeap::kBytes);
    EXPECT_EQ(heap.first_address, 0u);
  }
  std::set<std::uint32_t> numbers;
  for (const std::size_t end : {0u, 2u, 3u, 5u}) {
    ASSERT_TRUE(options.lands(end, 4));
    numbers.insert(landings.address(end).queue_pair);
    EXPECT_EQ(landings.address(end).heap_key, options.peer(end) == 0 ? 0x200u : 0x201u);
    landings.connect(end, landings.address(end));
    EXPECT_EQ(fake_.state_changes.back().attributes.qp_state, IBV_QPS_RTS);
  }
  EXPECT_EQ(numbers.size(), 4u);
  for (const std::size_t end : {1u, 4u}) EXPECT_FALSE(options.lands(end, 4)) << "rank 1 is on the same rail";
  EXPECT_EQ(fake_.queue_pairs.size(), 4u);
}

TEST_F(NicRailsTest, ANicThatCannotReachTheMemoryIsNamed) {
  fake_.refusals["reg_mr_iova2"] = ENOMEM;
  EXPECT_TRUE(contains(refusal([&] { landing_nics(1, 2); }), "RDMA device fake_0: ibv_reg_mr of "));
}

}  // namespace
}  // namespace deep_ep::rdma::verbs
