// Requests to NICs on a fabric that connects rails only, with a device that records them.
#include <gtest/gtest.h>

#include <cerrno>
#include <functional>
#include <memory>
#include <set>
#include <string>

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
    nic_.gpu.reset();
    handler_ = NicHandler::cpu;
  }
  void answer(std::uint64_t id, ibv_wc_status status) {
    ibv_wc completion{};
    completion.wr_id = id;
    completion.status = status;
    fake_.completions.push_back(completion);
  }
  static std::string refusal(const std::function<void()>& step) { return message_of<SystemError>(step); }

  const ConnectionOptions tries_{.peers = {1, 2}, .depth = 64, .hasty = true};
};

TEST_F(NicRailsTest, APathIsTriedByAnAdditionOfNothing) {
  make(tries_);
  EXPECT_LT(fake_.state_changes.back().attributes.timeout, PathOptions{}.ack_timeout) << "it is given up soon";
  answer(std::uint64_t{1} << 32, IBV_WC_SUCCESS);
  ends_->reach(1, ends_->address(1));
  ASSERT_EQ(fake_.posted.size(), 1u);
  const ibv_send_wr& request = fake_.posted[0].request;
  EXPECT_EQ(request.opcode, IBV_WR_ATOMIC_FETCH_AND_ADD);
  EXPECT_EQ(request.wr.atomic.rkey, table_.at(1).signal_key);
  EXPECT_EQ(request.wr.atomic.remote_addr, 0u);
  EXPECT_EQ(request.wr.atomic.compare_add, 0u);
  EXPECT_EQ(fake_.posted[0].piece.addr, table_.at(1).sink.address);
}

TEST_F(NicRailsTest, WhatAPathLacksIsSaid) {
  make(tries_);
  answer(0, IBV_WC_RETRY_EXC_ERR);
  EXPECT_TRUE(contains(refusal([&] { ends_->reach(0, ends_->address(0)); }),
                       "RDMA device fake_0:1: a message that tries a path has failed: "));
  fake_.refusals["modify_qp"] = ENETUNREACH;
  EXPECT_TRUE(contains(refusal([&] { ends_->connect(1, ends_->address(1)); }), "no route to the peer"));
}

/// Rank 4 of nodes of three: it is on rail 1, and receives by the NICs of rails 0 and 2.
TEST_F(NicRailsTest, TheHeapIsWrittenByTheNicOfEachOtherRail) {
  const ConnectionOptions options{.rank = 4, .peers = {0, 1, 2}, .channels = 2, .depth = 64, .rail_width = 3};
  const auto open = [&] { return nic_.open("fake_0", {.gid_index = 3}, fake_.functions, *heap_); };
  nic_.landing_nics = {open(), {}, open()};
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

TEST_F(NicRailsTest, ANicThatCannotReceiveIsNamedWithThisRanks) {
  EXPECT_TRUE(contains(refusal([&] { nic_.open("fake_1", {}, fake_.functions, *heap_); }),
                       "NIC fake_1 cannot receive for this rank, whose NIC is fake_0:1: RDMA device 'fake_1' is not"));
}

}  // namespace
}  // namespace deep_ep::rdma::verbs
