// Mailboxes byte by byte against those that rdma-core's own header makes, where its source lies in build/rdma-core
// (docs/rdma-verbs.md says how it comes there). It has no completion queues: libmlx5 leaves those to the kernel.
#include <gtest/gtest.h>
#include <infiniband/mlx5dv.h>

#include <cstring>
#include <vector>

#include "csrc/rdma/verbs/devx/commands.hpp"

#if __has_include("build/rdma-core/providers/mlx5/mlx5_ifc.h")
#define DEEP_EP_HAS_MLX5_IFC 1
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#include "build/rdma-core/providers/mlx5/mlx5_ifc.h"
#pragma GCC diagnostic pop
#undef u8
#endif

namespace deep_ep::rdma::verbs::devx {
namespace {

#ifdef DEEP_EP_HAS_MLX5_IFC

using Bytes = std::vector<std::uint8_t>;

Bytes bytes_of(const Mailbox& mailbox) {
  const auto* begin = static_cast<const std::uint8_t*>(mailbox.data());
  return {begin, begin + mailbox.size()};
}

ConnectionCommand connection(LinkLayer link_layer, bool needs_global_route) {
  ConnectionCommand command;
  command.queue_pair = 0x1234;
  command.path = {.port = 2, .gid_index = 5, .pkey_index = 9, .traffic_class = 0xa5, .service_level = 3};
  command.own = {.queue_pair = 0x1234, .packet_number = 0xabcdef, .mtu = 5, .link_layer = link_layer};
  command.own.needs_global_route = needs_global_route ? 1 : 0;
  command.own.gid = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8};
  command.peer = command.own;
  command.peer.queue_pair = 0x4321;
  command.peer.packet_number = 0x123456;
  command.peer.mtu = 4;
  command.peer.lid = 0x7788;
  command.peer.gid[15] = 9;
  command.peer_mac = {1, 2, 3, 4, 5, 6};
  command.log_outstanding_out = 3;
  command.log_outstanding_in = 4;
  command.counter_set = 7;
  command.physical_port = 2;
  return command;
}

#define SET(field, value) DEVX_SET(init2rtr_qp_in, mailbox.data(), field, value)

Bytes to_receive(const ConnectionCommand& command) {
  Bytes mailbox(DEVX_ST_SZ_BYTES(init2rtr_qp_in));
  const bool ethernet = command.own.link_layer == LinkLayer::ethernet;
  SET(opcode, MLX5_CMD_OP_INIT2RTR_QP);
  SET(qpn, 0x1234);
  SET(qpc.mtu, 4);
  SET(qpc.log_msg_max, 30);
  SET(qpc.remote_qpn, 0x4321);
  SET(qpc.next_rcv_psn, 0x123456);
  SET(qpc.min_rnr_nak, 12);
  SET(qpc.log_rra_max, 4);
  SET(qpc.primary_address_path.vhca_port_num, 2);
  if (ethernet || command.own.needs_global_route != 0) {
    SET(qpc.primary_address_path.src_addr_index, 5);
    SET(qpc.primary_address_path.hop_limit, 64);
    std::memcpy(DEVX_ADDR_OF(init2rtr_qp_in, mailbox.data(), qpc.primary_address_path.rgid_rip),
                command.peer.gid.data(), 16);
  }
  if (ethernet) {
    SET(qpc.primary_address_path.rmac_47_32, 0x0102);
    SET(qpc.primary_address_path.rmac_31_0, 0x03040506);
    SET(qpc.primary_address_path.eth_prio, 3);
    SET(qpc.primary_address_path.dscp, 0xa5 >> 2);
    SET(qpc.primary_address_path.udp_sport, udp_source_port(0x1234, 0x4321));
    return mailbox;
  }
  SET(qpc.primary_address_path.rlid, 0x7788);
  SET(qpc.primary_address_path.sl, 3);
  if (command.own.needs_global_route != 0) {
    SET(qpc.primary_address_path.grh, 1);
    SET(qpc.primary_address_path.tclass, 0xa5);
  }
  return mailbox;
}
#undef SET

TEST(DevxOracle, Routes) {
  for (const auto& command : {connection(LinkLayer::ethernet, false), connection(LinkLayer::infiniband, false),
                              connection(LinkLayer::infiniband, true)}) {
    EXPECT_EQ(bytes_of(init_to_ready_to_receive_command(command)), to_receive(command)) << to_string(command.own);
  }
}

TEST(DevxOracle, OtherStateChanges) {
  const ConnectionCommand command = connection(LinkLayer::ethernet, false);
  Bytes init(DEVX_ST_SZ_BYTES(rst2init_qp_in));
#define SET(field, value) DEVX_SET(rst2init_qp_in, init.data(), field, value)
  SET(opcode, MLX5_CMD_OP_RST2INIT_QP);
  SET(qpn, 0x1234);
  SET(qpc.pm_state, 3);
  SET(qpc.counter_set_id, 7);
  SET(qpc.lag_tx_port_affinity, 2);
  SET(qpc.rre, 1);
  SET(qpc.rwe, 1);
  SET(qpc.rae, 1);
  SET(qpc.atomic_mode, 3);
  SET(qpc.primary_address_path.vhca_port_num, 2);
  SET(qpc.primary_address_path.pkey_index, 9);
#undef SET
  EXPECT_EQ(bytes_of(reset_to_init_command(command)), init);

  Bytes send(DEVX_ST_SZ_BYTES(rtr2rts_qp_in));
#define SET(field, value) DEVX_SET(rtr2rts_qp_in, send.data(), field, value)
  SET(opcode, MLX5_CMD_OP_RTR2RTS_QP);
  SET(qpn, 0x1234);
  SET(qpc.log_sra_max, 3);
  SET(qpc.next_send_psn, 0xabcdef);
  SET(qpc.retry_count, 6);
  SET(qpc.rnr_retry, 7);
  SET(qpc.primary_address_path.ack_timeout, 18);
#undef SET
  EXPECT_EQ(bytes_of(ready_to_send_command(command)), send);
}

TEST(DevxOracle, CreationAndQuery) {
  Bytes create(DEVX_ST_SZ_BYTES(create_qp_in));
#define SET(field, value) DEVX_SET(create_qp_in, create.data(), field, value)
  SET(opcode, MLX5_CMD_OP_CREATE_QP);
  SET(qpc.pm_state, 3);
  SET(qpc.pd, 0x55);
  SET(qpc.uar_page, 0x66);
  SET(qpc.cqn_snd, 0x77);
  SET(qpc.cqn_rcv, 0x77);
  SET(qpc.log_sq_size, 10);
  SET(qpc.rq_type, 3);
  SET(qpc.ts_format, 1);
  SET(qpc.user_index, 5);
  SET(qpc.dbr_umem_valid, 1);
  SET(qpc.dbr_umem_id, 0x31);
  DEVX_SET64(create_qp_in, create.data(), qpc.dbr_addr, 0x1122334455667788);
  SET(wq_umem_valid, 1);
  SET(wq_umem_id, 0x31);
#undef SET
  EXPECT_EQ(bytes_of(create_queue_pair_command({.ring = {0x31, 0},
                                                .doorbell_record = {0x31, 0x1122334455667788},
                                                .log_depth = 10,
                                                .protection_domain = 0x55,
                                                .completion_queue = 0x77,
                                                .uar_page = 0x66,
                                                .user_index = 5})),
            create);

  Bytes query(DEVX_ST_SZ_BYTES(query_qp_in));
  DEVX_SET(query_qp_in, query.data(), opcode, MLX5_CMD_OP_QUERY_QP);
  DEVX_SET(query_qp_in, query.data(), qpn, 0x1234);
  EXPECT_EQ(bytes_of(query_queue_pair_command(0x1234)), query);

  Bytes lag(DEVX_ST_SZ_BYTES(query_lag_in));
  DEVX_SET(query_lag_in, lag.data(), opcode, MLX5_CMD_OP_QUERY_LAG);
  EXPECT_EQ(bytes_of(query_lag_command()), lag);
  Bytes bonded(DEVX_ST_SZ_BYTES(query_lag_out));
  DEVX_SET(query_lag_out, bonded.data(), ctx.lag_state, 3);
  Mailbox answer(layout::query_lag::bits);
  answer.set(layout::query_lag::lag_state, 3);
  EXPECT_EQ(bytes_of(answer), bonded);
}

#else

TEST(DevxOracle, Mailboxes) { GTEST_SKIP() << "no source of rdma-core in build/rdma-core (docs/rdma-verbs.md)"; }

#endif

}  // namespace
}  // namespace deep_ep::rdma::verbs::devx
