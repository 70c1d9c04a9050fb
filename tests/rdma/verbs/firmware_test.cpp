// Each rule of the fake's firmware is broken once, in a command that is otherwise good.
#include "tests/rdma/verbs/firmware.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "csrc/rdma/verbs/devx/commands.hpp"

namespace deep_ep::rdma::verbs::test {
namespace {

namespace l = devx::layout;
using devx::Field;
using devx::Mailbox;
using devx::within;

constexpr std::uint32_t kMemory = 0x31, kPage = 0x66, kCompletionQueue = 0x77, kPair = 0x1234;

Field of_queue(Field field) { return within(l::create_cq::context, field); }
Field of_pair(Field field) { return within(l::queue_pair::context, field); }
Field of_path(Field field) { return of_pair(within(l::qpc::primary_address_path, field)); }

class FirmwareTest : public testing::Test {
 protected:
  FirmwareTest() {
    facts_.attributes.max_qp_wr = 8192;
    facts_.attributes.max_qp_rd_atom = facts_.attributes.max_qp_init_rd_atom = 16;
    facts_.attributes.phys_port_cnt = 1;
    facts_.port.link_layer = IBV_LINK_LAYER_ETHERNET;
    facts_.port.active_mtu = IBV_MTU_4096;
    facts_.gid_indices = {3};
    firmware_.add_memory(kMemory, 0, 65536 + 4096, ~std::uint64_t{0});
    firmware_.add_register(kPage);
    firmware_.add_completion_queue(kCompletionQueue);
    firmware_.add_queue_pair(kPair);
    connection_.queue_pair = kPair;
    connection_.path.gid_index = 3;
    connection_.own = {.mtu = IBV_MTU_4096, .link_layer = LinkLayer::ethernet, .gid = {1}};
    connection_.peer = connection_.own;
    connection_.peer.lid = 8;
    connection_.peer_mac = {2, 1, 1, 1, 1, 1};
  }

  std::string rule(const Mailbox& command) const {
    const auto* bytes = static_cast<const std::uint8_t*>(command.data());
    const std::vector<std::uint8_t> copy(bytes, bytes + command.size());
    const auto refusal = firmware_.refuse(facts_, MailboxView(copy));
    syndrome_ = refusal ? refusal->syndrome : 0;
    return refusal ? refusal->rule : "";
  }
  std::string rule(Mailbox command, Field field, std::uint64_t value) const { return rule(command.set(field, value)); }

  static Mailbox completion_queue() {
    return devx::create_completion_queue_command({.entry = {kMemory, 65536},
                                                  .doorbell_record = {kMemory, 65536 + 192},
                                                  .event_queue = kEventQueue,
                                                  .uar_page = kPage});
  }
  static Mailbox queue_pair() {
    return devx::create_queue_pair_command({.ring = {kMemory, 0},
                                            .doorbell_record = {kMemory, 65536 + 128},
                                            .log_depth = 10,
                                            .protection_domain = kProtectionDomain,
                                            .completion_queue = kCompletionQueue,
                                            .uar_page = kPage});
  }
  Mailbox to_receive() {
    firmware_.set_state(kPair, 1);
    return devx::init_to_ready_to_receive_command(connection_);
  }
  void become_infiniband() {
    facts_.port.link_layer = IBV_LINK_LAYER_INFINIBAND;
    connection_.own.link_layer = connection_.peer.link_layer = LinkLayer::infiniband;
  }

  FirmwareFacts facts_;
  Firmware firmware_;
  devx::ConnectionCommand connection_;
  mutable std::uint32_t syndrome_ = 0;
};

TEST_F(FirmwareTest, CompletionQueues) {
  const Mailbox good = completion_queue();
  EXPECT_EQ(rule(good), "");
  EXPECT_EQ(rule(good, l::create_cq::cq_umem_valid, 0), "a queue without memory of the user");
  EXPECT_EQ(rule(good, l::create_cq::cq_umem_offset, 65536 + 32), "the offset is no multiple of the page size / 64");
  Mailbox large_pages = good;
  large_pages.set(of_queue(l::cqc::log_page_size), 4);
  EXPECT_EQ(rule(large_pages, l::create_cq::cq_umem_offset, 64), "the offset is no multiple of the page size / 64");
  EXPECT_EQ(firmware_.add_memory(kMemory, 0, 131072, ~std::uint64_t{0}), 131072U) << "the largest that fits";
  EXPECT_EQ(rule(good, l::create_cq::cq_umem_offset, 65536 + 64), "the offset is no multiple of the page size / 64");
  EXPECT_EQ(firmware_.add_memory(kMemory, 8192, 131072, ~std::uint64_t{0}), 8192U) << "alignment counts";
  EXPECT_EQ(firmware_.add_memory(kMemory, 0, 131072 + 4096, ~std::uint64_t{0}), 4096U) << "and length";
  EXPECT_EQ(firmware_.add_memory(kMemory, 4096, 131072, 65536), 0U) << "no page of the allowed sizes";
  firmware_.add_memory(kMemory, 0, 65536 + 4096, 4096);
  EXPECT_EQ(rule(good, l::create_cq::cq_umem_id, 1), "entries in memory that is not registered");
  EXPECT_EQ(rule(good, of_queue(l::cqc::log_cq_size), 7), "entries in beyond the registered memory");
  EXPECT_EQ(rule(good, of_queue(l::cqc::dbr_addr), 65536 + 68), "the doorbell record is not aligned to 8 bytes");
  EXPECT_EQ(rule(good, of_queue(l::cqc::uar_page), 1), "a foreign doorbell page");
  EXPECT_EQ(rule(good, of_queue(l::cqc::c_eqn), 1), "a foreign event queue");
}

TEST_F(FirmwareTest, QueuePairs) {
  const Mailbox good = queue_pair();
  EXPECT_EQ(rule(good), "");
  EXPECT_EQ(rule(good, of_pair(l::qpc::pd), 1), "a foreign protection domain");
  EXPECT_EQ(rule(good, of_pair(l::qpc::uar_page), 1), "a foreign doorbell page");
  EXPECT_EQ(rule(good, of_pair(l::qpc::cqn_rcv), 1), "a foreign completion queue");
  EXPECT_EQ(rule(good, of_pair(l::qpc::log_sq_size), 14), "deeper than the device allows");
  EXPECT_EQ(rule(good, of_pair(l::qpc::log_sq_size), 11), "ring in beyond the registered memory");
  EXPECT_EQ(rule(good, of_pair(l::qpc::log_rq_size), 1), "a receive queue of a pair that has none");
  EXPECT_EQ(rule(good, of_pair(l::qpc::dbr_umem_id), 1), "record in memory that is not registered");
  EXPECT_EQ(rule(good, l::queue_pair::wq_umem_offset, 32), "the offset is no multiple of the page size / 64");
}

TEST_F(FirmwareTest, StatesGoInTheirOrder) {
  EXPECT_EQ(rule(devx::reset_to_init_command(connection_)), "");
  EXPECT_EQ(rule(devx::init_to_ready_to_receive_command(connection_)), "a state change out of order");
  EXPECT_EQ(rule(devx::reset_to_init_command(connection_), l::queue_pair::qpn, 9), "a foreign queue pair");
  EXPECT_EQ(rule(devx::reset_to_init_command(connection_), of_path(l::ads::vhca_port_num), 2),
            "a port that does not exist");
  EXPECT_EQ(rule(devx::reset_to_init_command(connection_), of_pair(l::qpc::pm_state), 0), "no migration state");
  EXPECT_EQ(rule(devx::reset_to_init_command(connection_), of_pair(l::qpc::counter_set_id), 7),
            "a foreign set of counters");
  firmware_.set_state(kPair, 2);
  EXPECT_EQ(rule(devx::ready_to_send_command(connection_)), "");
  EXPECT_EQ(rule(devx::ready_to_send_command(connection_), of_pair(l::qpc::log_sra_max), 5),
            "more atomics under way than the device allows");
}

TEST_F(FirmwareTest, RoutesOnRoce) {
  const Mailbox good = to_receive();
  EXPECT_EQ(rule(good), "");
  EXPECT_EQ(rule(good, of_pair(l::qpc::mtu), 6), "an MTU that the port does not have");
  EXPECT_EQ(rule(good, of_pair(l::qpc::log_msg_max), 31), "messages that are too long");
  EXPECT_EQ(rule(good, of_pair(l::qpc::log_rra_max), 5), "more atomics to answer than the device allows");
  EXPECT_EQ(rule(good, of_path({l::ads::rgid_rip, 8}), 0), "no remote GID");
  EXPECT_EQ(rule(good, of_path(l::ads::src_addr_index), 2), "an empty source GID");
  EXPECT_EQ(rule(good, of_path(l::ads::hop_limit), 0), "hop limit 0");
  EXPECT_EQ(rule(good, of_path(l::ads::udp_sport), 4791), "a UDP source port below 0xc000");
  connection_.peer_mac = {};
  EXPECT_EQ(rule(to_receive()), "no remote MAC");
}

TEST_F(FirmwareTest, RoutesOnInfiniBand) {
  become_infiniband();
  const Mailbox good = to_receive();
  EXPECT_EQ(rule(good), "");
  EXPECT_EQ(rule(good, of_path(l::ads::tclass), 106), "a traffic class without GRH");
  EXPECT_EQ(syndrome_, 0x764216U);
  EXPECT_EQ(rule(good, of_path(l::ads::rlid), 0), "LID 0");
  facts_.port.flags = IBV_QPF_GRH_REQUIRED;
  EXPECT_EQ(rule(good), "no GRH on a port that needs it");
  EXPECT_EQ(rule(good, of_path(l::ads::grh), 1), "no remote GID");
}

TEST_F(FirmwareTest, StateChangesOfVerbs) {
  const ibv_qp pair{};
  ibv_qp_attr to_receive{};
  to_receive.qp_state = IBV_QPS_RTR;
  to_receive.path_mtu = IBV_MTU_4096;
  const int all =
      IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  EXPECT_EQ(firmware_.refuse(facts_, &pair, to_receive, all), "a state change out of order");
  firmware_.set_state(&pair, IBV_QPS_INIT);
  EXPECT_EQ(firmware_.refuse(facts_, &pair, to_receive, all & ~IBV_QP_AV),
            "attributes that the state change needs are missing");
  EXPECT_EQ(firmware_.refuse(facts_, &pair, to_receive, all), "no GRH on a port that needs it");
  to_receive.ah_attr.is_global = 1;
  EXPECT_EQ(firmware_.refuse(facts_, &pair, to_receive, all), "an empty source GID");
  to_receive.ah_attr.grh.sgid_index = 3;
  EXPECT_EQ(firmware_.refuse(facts_, &pair, to_receive, all), "");
  to_receive.max_dest_rd_atomic = 17;
  EXPECT_EQ(firmware_.refuse(facts_, &pair, to_receive, all), "more atomics to answer than the device allows");
}

}  // namespace
}  // namespace deep_ep::rdma::verbs::test
