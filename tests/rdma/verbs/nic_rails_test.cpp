// Requests to NICs on a fabric that connects rails only, with a device that records them.
#include "csrc/rdma/verbs/nic_rails.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "deep_ep/error.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/rdma/verbs/nic_fixture.hpp"

namespace deep_ep::rdma::verbs {
namespace {

using deep_ep::test::contains;
using deep_ep::test::message_of;

class NicRailsTest : public test::NicFixture {
 protected:
  NicRailsTest() {
    nic_.gpu_memory = false;
    handler_ = NicHandler::cpu;
  }
  std::unique_ptr<Paths> paths(const LandingNics& landings = {}) {
    return make_nic_paths(own_, 4, landings, fake_.functions);
  }
  /// Of a rank of nodes of so many.
  LandingNics landing_nics(std::size_t own_rail, std::size_t rails) {
    return open_landing_nics(nic_, own_rail, std::vector(rails, own_), *heap_, fake_.functions);
  }
  void answer(std::uint64_t id, ibv_wc_status status) {
    ibv_wc completion{};
    completion.wr_id = id;
    completion.status = status;
    fake_.completions.push_back(completion);
  }
  static std::string refusal(const std::function<void()>& step) { return message_of<SystemError>(step); }

  const WireFacts own_{.nic = {"fake_0"}, .path = {.gid_index = 3}};
};

TEST_F(NicRailsTest, APathIsTriedByAWriteOfNoBytes) {
  const auto paths = this->paths();
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
  const std::uint32_t key = nics.of_rail[1]->signals.remote_key();
  const auto paths = this->paths(nics);
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
  const auto paths = this->paths();
  paths->connect(0, paths->address(2));
  answer(0, IBV_WC_RETRY_EXC_ERR);
  EXPECT_TRUE(
      contains(refusal([&] { paths->reach(0); }), "RDMA device fake_0:1: a message that tries a path has failed: "));
  fake_.refusals["modify_qp"] = ENETUNREACH;
  EXPECT_TRUE(contains(refusal([&] { paths->connect(1, paths->address(3)); }), "no route to the peer"));
}

/// Rank 4 of nodes of three: it is on rail 1, and receives by the NICs of rails 0 and 2.
TEST_F(NicRailsTest, TheHeapIsRegisteredWithTheNicOfEachOtherRail) {
  const ConnectionOptions options{.rank = 4, .peers = {0, 1, 2}, .channels = 2, .depth = 64, .rail_width = 3};
  nic_.landing_nics = std::make_shared<const LandingNics>(landing_nics(1, 3));
  ASSERT_EQ(fake_.registered.size(), 2u);
  for (const auto& heap : fake_.registered) {
    EXPECT_EQ(heap.address, heap_->local());
    EXPECT_EQ(heap.bytes, test::kHeapBytes);
    EXPECT_EQ(heap.first_address, 0u);
  }
  make(options);
  std::set<std::uint32_t> numbers;
  for (std::size_t end = 0; end < options.ends(); ++end) {
    ASSERT_EQ(options.lands(end), end % 3 != 1) << "rank 1 is on the same rail";
    if (!options.lands(end)) continue;
    numbers.insert(ends_->landing(end).queue_pair);
    EXPECT_EQ(ends_->landing(end).heap_key, options.peer(end) == 0 ? 0x200u : 0x201u);
    ends_->connect_landing(end, ends_->landing(end));
    EXPECT_EQ(fake_.state_changes.back().attributes.qp_state, IBV_QPS_RTS);
  }
  EXPECT_EQ(numbers.size(), 4u);
  EXPECT_EQ(fake_.queue_pairs.size(), 4u + options.ends());
}

}  // namespace
}  // namespace deep_ep::rdma::verbs
