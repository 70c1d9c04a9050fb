// Commands and field places of the mlx5 programmer's reference manual, as far as this library uses them. They are those
// of the kernel's include/linux/mlx5/mlx5_ifc.h and rdma-core's providers/mlx5/mlx5_ifc.h, whose names they have; a
// test compares them with the kernel's file.
#pragma once

#include <cstdint>

namespace deep_ep::rdma::verbs::devx {

/// The place of a field in a mailbox: bits are counted from the most significant bit of the first byte, as the
/// programmer's reference manual and the kernel's mlx5_ifc.h do.
struct Field {
  std::uint32_t bit = 0;
  std::uint32_t width = 0;
};

/// A command for the firmware, and how many bits it and its answer have.
struct Command {
  std::uint16_t opcode;
  const char* name;
  std::uint32_t bits;
  std::uint32_t answer_bits;
};

}  // namespace deep_ep::rdma::verbs::devx

namespace deep_ep::rdma::verbs::devx::layout {

inline constexpr std::uint32_t kShort = 0x80;     ///< without a context
inline constexpr std::uint32_t kContext = 0x880;  ///< with the context of a queue or queue pair
inline constexpr Command kQueryHcaCap{0x100, "QUERY_HCA_CAP", kShort, 0x80 + 0x8000};
inline constexpr Command kCreateCq{0x400, "CREATE_CQ", kContext, kShort};
inline constexpr Command kCreateQp{0x500, "CREATE_QP", kContext, kShort};
inline constexpr Command kRst2InitQp{0x502, "RST2INIT_QP", kContext, kShort};
inline constexpr Command kInit2RtrQp{0x503, "INIT2RTR_QP", kContext, kShort};
inline constexpr Command kRtr2RtsQp{0x504, "RTR2RTS_QP", kContext, kShort};
inline constexpr Command kQueryQp{0x50b, "QUERY_QP", kShort, kContext};
inline constexpr Command kQueryLag{0x842, "QUERY_LAG", kShort, kShort};

/// What every command begins with, and every answer.
namespace command {
inline constexpr Field opcode{0x00, 16};
inline constexpr Field op_mod{0x30, 16};
}  // namespace command
namespace answer {
inline constexpr Field status{0x00, 8};
inline constexpr Field syndrome{0x20, 32};
inline constexpr Field number{0x48, 24};  ///< cqn of CREATE_CQ, qpn of CREATE_QP
}  // namespace answer

namespace create_cq {
inline constexpr Field cq_umem_offset{0x280, 64};
inline constexpr Field cq_umem_id{0x2c0, 32};
inline constexpr Field cq_umem_valid{0x2e0, 1};
}  // namespace create_cq

/// Context of a completion queue, in CREATE_CQ.
namespace cqc {
constexpr Field at(std::uint32_t bit, std::uint32_t width) { return {0x80 + bit, width}; }
inline constexpr Field dbr_umem_valid = at(0x06, 1);
inline constexpr Field cc = at(0x0b, 1);
inline constexpr Field oi = at(0x0e, 1);
inline constexpr Field dbr_umem_id = at(0x20, 32);
inline constexpr Field uar_page = at(0x68, 24);
inline constexpr Field c_eqn = at(0xb8, 8);
inline constexpr Field log_page_size = at(0xc3, 5);
inline constexpr Field dbr_addr = at(0x1c0, 64);
}  // namespace cqc

/// CREATE_QP, QUERY_QP's answer, and the state changes that carry a context.
namespace queue_pair {
inline constexpr Field qpn{0x48, 24};  ///< in commands that are about an existing one
inline constexpr Field wq_umem_offset{0x800, 64};
inline constexpr Field wq_umem_id{0x840, 32};
inline constexpr Field wq_umem_valid{0x860, 1};
}  // namespace queue_pair

/// Context of a queue pair, in the same commands.
namespace qpc {
constexpr Field at(std::uint32_t bit, std::uint32_t width) { return {0xc0 + bit, width}; }
inline constexpr Field state = at(0x00, 4);
inline constexpr Field lag_tx_port_affinity = at(0x04, 4);
inline constexpr Field pm_state = at(0x13, 2);
inline constexpr Field pd = at(0x28, 24);
inline constexpr Field mtu = at(0x40, 3);
inline constexpr Field log_msg_max = at(0x43, 5);
inline constexpr Field log_sq_size = at(0x51, 4);
inline constexpr Field ts_format = at(0x58, 2);
inline constexpr Field counter_set_id = at(0x60, 8);
inline constexpr Field uar_page = at(0x68, 24);
inline constexpr Field log_page_size = at(0xa3, 5);
inline constexpr Field remote_qpn = at(0xa8, 24);
inline constexpr Field log_sra_max = at(0x388, 3);
inline constexpr Field retry_count = at(0x38d, 3);
inline constexpr Field rnr_retry = at(0x390, 3);
inline constexpr Field next_send_psn = at(0x3c8, 24);
inline constexpr Field cqn_snd = at(0x3e8, 24);
inline constexpr Field log_rra_max = at(0x488, 3);
inline constexpr Field atomic_mode = at(0x48c, 4);
inline constexpr Field rwe = at(0x491, 1);
inline constexpr Field rae = at(0x492, 1);
inline constexpr Field min_rnr_nak = at(0x4a3, 5);
inline constexpr Field next_rcv_psn = at(0x4a8, 24);
inline constexpr Field cqn_rcv = at(0x4e8, 24);
inline constexpr Field dbr_addr = at(0x500, 64);
inline constexpr Field rq_type = at(0x565, 3);
inline constexpr Field hw_sq_wqebb_counter = at(0x5a0, 16);
inline constexpr Field sw_sq_wqebb_counter = at(0x5b0, 16);
inline constexpr Field dbr_umem_valid = at(0x683, 1);
inline constexpr Field dbr_umem_id = at(0x720, 32);

inline constexpr std::uint64_t state_ready_to_send = 3;
inline constexpr std::uint64_t state_error = 6;
inline constexpr std::uint64_t pm_state_migrated = 3;
inline constexpr std::uint64_t rq_type_zero_size = 3;
inline constexpr std::uint64_t ts_format_default = 1;
inline constexpr std::uint64_t atomic_mode_up_to_8_bytes = 3;
}  // namespace qpc

/// Address path in that context (primary_address_path).
namespace ads {
constexpr Field at(std::uint32_t bit, std::uint32_t width) { return {0xc0 + 0xc0 + bit, width}; }
inline constexpr Field pkey_index = at(0x10, 16);
inline constexpr Field grh = at(0x28, 1);
inline constexpr Field rlid = at(0x30, 16);
inline constexpr Field ack_timeout = at(0x40, 5);
inline constexpr Field src_addr_index = at(0x48, 8);
inline constexpr Field hop_limit = at(0x58, 8);
inline constexpr Field tclass = at(0x64, 8);
inline constexpr std::uint32_t rgid_rip = at(0x80, 128).bit;  ///< 16 bytes
inline constexpr Field dscp = at(0x10a, 6);
inline constexpr Field udp_sport = at(0x110, 16);
inline constexpr Field eth_prio = at(0x121, 3);
inline constexpr Field sl = at(0x124, 4);
inline constexpr Field vhca_port_num = at(0x128, 8);
inline constexpr std::uint32_t rmac = at(0x130, 48).bit;  ///< 6 bytes: rmac_47_32, rmac_31_0
}  // namespace ads

/// General capabilities in the answer (op_mod 0 << 1 | 1: current values).
namespace cmd_hca_cap {
constexpr Field at(std::uint32_t bit, std::uint32_t width) { return {0x80 + bit, width}; }
inline constexpr std::uint16_t op_mod = 0 << 1 | 1;
inline constexpr Field cqe_version = at(0x1fc, 4);
inline constexpr Field num_lag_ports = at(0x27c, 4);
}  // namespace cmd_hca_cap

/// Answer of QUERY_LAG.
namespace query_lag {
inline constexpr Field port_select_mode{0x55, 3};  ///< 0: by queue pair
inline constexpr Field lag_state{0x5d, 3};         ///< 0: not bonded
}  // namespace query_lag

}  // namespace deep_ep::rdma::verbs::devx::layout
