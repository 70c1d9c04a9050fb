// Command numbers and field places of the mlx5 programmer's reference manual, as far as this library uses them. They
// are those of the kernel's include/linux/mlx5/mlx5_ifc.h and rdma-core's providers/mlx5/mlx5_ifc.h, whose names they
// have; a test compares them with the kernel's file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace deep_ep::rdma::verbs::devx {

/// Where a field lies: bits are counted from the most significant bit of the first byte, as the programmer's reference
/// manual and the kernel's mlx5_ifc.h do.
struct Field {
  std::uint32_t bit = 0;
  std::uint32_t width = 0;
};

/// A field of a structure that begins at `base` of another one.
constexpr Field within(std::uint32_t base, Field field) { return {base + field.bit, field.width}; }

/// A command for the firmware, or its answer: big-endian bit fields at fixed places.
class Mailbox {
 public:
  explicit Mailbox(std::uint32_t bits);

  /// std::logic_error for a value that does not fit, or a field that lies outside.
  Mailbox& set(Field field, std::uint64_t value);
  std::uint64_t get(Field field) const;
  /// Whole bytes, for GIDs.
  Mailbox& set_bytes(std::uint32_t bit, std::span<const std::uint8_t> bytes);

  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  std::size_t size() const { return bytes_.size(); }

 private:
  std::vector<std::uint8_t> bytes_;
};

}  // namespace deep_ep::rdma::verbs::devx

namespace deep_ep::rdma::verbs::devx::layout {

enum class Opcode : std::uint16_t {
  query_hca_cap = 0x100,
  create_cq = 0x400,
  create_qp = 0x500,
  rst2init_qp = 0x502,
  init2rtr_qp = 0x503,
  rtr2rts_qp = 0x504,
  query_qp = 0x50b,
  query_lag = 0x842,
};

/// What every command begins with, and every answer.
namespace command {
inline constexpr Field opcode{0x00, 16};
inline constexpr Field op_mod{0x30, 16};
inline constexpr std::uint32_t short_bits = 0x80;     ///< commands without a context
inline constexpr std::uint32_t context_bits = 0x880;  ///< commands with the context of a queue or queue pair
}  // namespace command
namespace answer {
inline constexpr Field status{0x00, 8};
inline constexpr Field syndrome{0x20, 32};
inline constexpr Field number{0x48, 24};  ///< cqn of CREATE_CQ, qpn of CREATE_QP
inline constexpr std::uint32_t short_bits = 0x80;
inline constexpr std::uint32_t capability_bits = 0x80 + 0x8000;
inline constexpr std::uint32_t capability = 0x80;  ///< where the capabilities begin
}  // namespace answer

namespace create_cq {
inline constexpr std::uint32_t context = 0x80;
inline constexpr Field cq_umem_offset{0x280, 64};
inline constexpr Field cq_umem_id{0x2c0, 32};
inline constexpr Field cq_umem_valid{0x2e0, 1};
}  // namespace create_cq

/// Context of a completion queue.
namespace cqc {
inline constexpr Field dbr_umem_valid{0x06, 1};
inline constexpr Field cc{0x0b, 1};
inline constexpr Field oi{0x0e, 1};
inline constexpr Field dbr_umem_id{0x20, 32};
inline constexpr Field uar_page{0x68, 24};
inline constexpr Field c_eqn{0xb8, 8};
inline constexpr Field log_page_size{0xc3, 5};
inline constexpr Field dbr_addr{0x1c0, 64};
}  // namespace cqc

/// CREATE_QP, QUERY_QP's answer, and the state changes that carry a context.
namespace queue_pair {
inline constexpr std::uint32_t context = 0xc0;
inline constexpr Field qpn{0x48, 24};  ///< in commands that are about an existing one
inline constexpr Field wq_umem_offset{0x800, 64};
inline constexpr Field wq_umem_id{0x840, 32};
inline constexpr Field wq_umem_valid{0x860, 1};
}  // namespace queue_pair

/// Context of a queue pair.
namespace qpc {
inline constexpr Field state{0x00, 4};
inline constexpr Field lag_tx_port_affinity{0x04, 4};
inline constexpr Field pm_state{0x13, 2};
inline constexpr Field pd{0x28, 24};
inline constexpr Field mtu{0x40, 3};
inline constexpr Field log_msg_max{0x43, 5};
inline constexpr Field log_sq_size{0x51, 4};
inline constexpr Field ts_format{0x58, 2};
inline constexpr Field counter_set_id{0x60, 8};
inline constexpr Field uar_page{0x68, 24};
inline constexpr Field log_page_size{0xa3, 5};
inline constexpr Field remote_qpn{0xa8, 24};
inline constexpr std::uint32_t primary_address_path = 0xc0;
inline constexpr Field log_sra_max{0x388, 3};
inline constexpr Field retry_count{0x38d, 3};
inline constexpr Field rnr_retry{0x390, 3};
inline constexpr Field next_send_psn{0x3c8, 24};
inline constexpr Field cqn_snd{0x3e8, 24};
inline constexpr Field log_rra_max{0x488, 3};
inline constexpr Field atomic_mode{0x48c, 4};
inline constexpr Field rwe{0x491, 1};
inline constexpr Field rae{0x492, 1};
inline constexpr Field min_rnr_nak{0x4a3, 5};
inline constexpr Field next_rcv_psn{0x4a8, 24};
inline constexpr Field cqn_rcv{0x4e8, 24};
inline constexpr Field dbr_addr{0x500, 64};
inline constexpr Field rq_type{0x565, 3};
inline constexpr Field hw_sq_wqebb_counter{0x5a0, 16};
inline constexpr Field sw_sq_wqebb_counter{0x5b0, 16};
inline constexpr Field dbr_umem_valid{0x683, 1};
inline constexpr Field dbr_umem_id{0x720, 32};

inline constexpr std::uint64_t pm_state_migrated = 3;
inline constexpr std::uint64_t rq_type_zero_size = 3;
inline constexpr std::uint64_t ts_format_default = 1;
inline constexpr std::uint64_t atomic_mode_up_to_8_bytes = 3;
}  // namespace qpc

/// Address path.
namespace ads {
inline constexpr Field pkey_index{0x10, 16};
inline constexpr Field grh{0x28, 1};
inline constexpr Field rlid{0x30, 16};
inline constexpr Field ack_timeout{0x40, 5};
inline constexpr Field src_addr_index{0x48, 8};
inline constexpr Field hop_limit{0x58, 8};
inline constexpr Field tclass{0x64, 8};
inline constexpr std::uint32_t rgid_rip = 0x80;  ///< 16 bytes
inline constexpr Field dscp{0x10a, 6};
inline constexpr Field udp_sport{0x110, 16};
inline constexpr Field eth_prio{0x121, 3};
inline constexpr Field sl{0x124, 4};
inline constexpr Field vhca_port_num{0x128, 8};
inline constexpr Field rmac_47_32{0x130, 16};
inline constexpr Field rmac_31_0{0x140, 32};
}  // namespace ads

/// General capabilities (op_mod 0 << 1 | 1: current values).
namespace cmd_hca_cap {
inline constexpr std::uint16_t op_mod = 0 << 1 | 1;
inline constexpr Field cqe_version{0x1fc, 4};
inline constexpr Field num_lag_ports{0x27c, 4};
}  // namespace cmd_hca_cap

/// Answer of QUERY_LAG.
namespace query_lag {
inline constexpr std::uint32_t bits = 0x80;
inline constexpr Field port_select_mode{0x55, 3};  ///< 0: by queue pair
inline constexpr Field lag_state{0x5d, 3};         ///< 0: not bonded
}  // namespace query_lag

/// Capabilities of atomics (op_mod 3 << 1 | 1).
namespace atomic_caps {
inline constexpr std::uint16_t op_mod = 3 << 1 | 1;
inline constexpr Field atomic_req_8b_endianness_mode{0x40, 2};
inline constexpr Field atomic_operations{0x90, 16};
inline constexpr Field atomic_size_qp{0xb0, 16};
inline constexpr std::uint64_t host_order = 1;  ///< of atomic_req_8b_endianness_mode
inline constexpr std::uint64_t operation_fetch_add = 1 << 1;
inline constexpr std::uint64_t size_8_bytes = 8;
}  // namespace atomic_caps

}  // namespace deep_ep::rdma::verbs::devx::layout
