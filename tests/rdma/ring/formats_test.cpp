// Entries, byte by byte: against known-good bytes and against rdma-core's structures.
#include "kernels/rdma/formats.hpp"

#include <gtest/gtest.h>
#include <infiniband/mlx5dv.h>

#include <cstdio>
#include <cstring>
#include <span>
#include <string>

namespace deep_ep::device::rdma {
namespace {

constexpr std::uint32_t kNumber = 0x1234;
constexpr KeyedAddress kRemote{0x7f1122334400, 0xabcdef};
constexpr KeyedAddress kLocal{0x7f5566778800, 0x112233};

/// Memory as hexadecimal words, in the order of the bytes.
std::string bytes(const void* memory, std::size_t count) {
  std::string hex;
  for (std::size_t i = 0; i < count; ++i) {
    char digits[4];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<const unsigned char*>(memory)[i]);
    if (i != 0 && i % 4 == 0) hex += ' ';
    hex += digits;
  }
  return hex;
}

WorkQueueEntry stale() {
  WorkQueueEntry entry;
  std::memset(&entry, 0xa5, sizeof entry);
  return entry;
}

TEST(RdmaFormats, EmptyWriteHasNoDataSegment) {
  WorkQueueEntry entry = stale();
  write_entry(entry, 5, kNumber, kRemote, kLocal, 0);
  EXPECT_EQ(bytes(&entry, 32), "00000508 00123402 00000000 00000000 00007f11 22334400 00abcdef 00000000");
}

TEST(RdmaFormats, CountersHaveSixteenBits) {
  WorkQueueEntry entry = stale();
  write_entry(entry, 0x1ffff, 0xffffff, kRemote, kLocal, 0);
  EXPECT_EQ(bytes(&entry, 16), "00ffff08 ffffff02 00000000 00000000");
  const std::uint64_t doorbell = doorbell_word(0x20000, 0xffffff);
  EXPECT_EQ(bytes(&doorbell, 8), "00000000 ffffff00");
  EXPECT_EQ(record_word(0x2abcd), swap32(0xabcd));
}

struct Reference {
  mlx5_wqe_ctrl_seg control;
  mlx5_wqe_raddr_seg remote;
  union {
    mlx5_wqe_data_seg data;
    mlx5_wqe_atomic_seg atomic;
    unsigned char both[32];
  };
};
static_assert(sizeof(Reference) == 64);

Reference reference(std::uint64_t index, std::uint8_t opcode, std::uint8_t segments, std::uint8_t flags) {
  Reference r;
  std::memset(&r, 0, sizeof r);
  mlx5dv_set_ctrl_seg(&r.control, static_cast<std::uint16_t>(index), opcode, 0, kNumber, flags, segments, 0, 0);
  r.remote.raddr = htobe64(kRemote.address);
  r.remote.rkey = htobe32(kRemote.key);
  return r;
}

TEST(RdmaFormatsAgainstRdmaCore, EveryEntry) {
  for (const std::uint64_t index : {0ull, 1ull, 127ull, 0xfffeull, 0xffffull, 0x10000ull, 0x7fff8001ull}) {
    for (const std::uint32_t flags : {0u, static_cast<std::uint32_t>(MLX5_WQE_CTRL_CQ_UPDATE)}) {
      const auto f = static_cast<std::uint8_t>(flags);
      const auto ask = [&](WorkQueueEntry& entry) {
        if (flags != 0) signal_entry(entry);
      };
      WorkQueueEntry entry{};

      Reference r = reference(index, MLX5_OPCODE_RDMA_WRITE, 3, f);
      mlx5dv_set_data_seg(&r.data, 0x12345678, kLocal.key, kLocal.address);
      write_entry(entry, index, kNumber, kRemote, kLocal, 0x12345678);
      ask(entry);
      EXPECT_EQ(bytes(&entry, 48), bytes(&r, 48));

      r = reference(index, MLX5_OPCODE_ATOMIC_FA, 4, f);
      r.atomic.swap_add = htobe64(0x0102030405060708ull);
      auto* sink = reinterpret_cast<mlx5_wqe_data_seg*>(reinterpret_cast<char*>(&r) + 48);
      mlx5dv_set_data_seg(sink, 8, kLocal.key, kLocal.address);
      entry = {};
      fetch_add_entry(entry, index, kNumber, kRemote, kLocal, 0x0102030405060708ull);
      ask(entry);
      EXPECT_EQ(bytes(&entry, 64), bytes(&r, 64));
    }
  }
}

TEST(RdmaFormatsAgainstRdmaCore, CompletionEntry) {
  static_assert(sizeof(CompletionEntry) == sizeof(mlx5_cqe64));
  static_assert(offsetof(CompletionEntry, tail) == offsetof(mlx5_cqe64, wqe_counter));
  static_assert(kCompletionOk == MLX5_CQE_REQ && kCompletionError == MLX5_CQE_REQ_ERR &&
                kCompletionNotYetWritten == MLX5_CQE_INVALID);
  mlx5_cqe64 completion{};
  completion.wqe_counter = htobe16(0xfedc);
  completion.op_own = MLX5_CQE_REQ_ERR << 4;
  std::uint32_t tail;
  std::memcpy(&tail, &completion.wqe_counter, sizeof tail);
  EXPECT_EQ(tail, tail_word(0xfedc, kCompletionError));
  EXPECT_EQ(tail_opcode(tail), mlx5dv_get_cqe_opcode(&completion));

  CompletionEntry failed{};
  failed.syndrome = MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR;
  failed.vendor_syndrome = 0x88;
  failed.opcode_number = swap32(MLX5_OPCODE_RDMA_WRITE << 24 | 0x1234);
  mlx5_err_cqe error;
  std::memcpy(&error, &failed, sizeof error);
  EXPECT_EQ(error.syndrome, MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
  EXPECT_EQ(error.vendor_err_synd, 0x88);
  EXPECT_EQ(be32toh(error.s_wqe_opcode_qpn), MLX5_OPCODE_RDMA_WRITE << 24 | 0x1234u);
}

TEST(RdmaFormatsAgainstRdmaCore, Constants) {
  EXPECT_EQ(kOpcodeNop, static_cast<unsigned>(MLX5_OPCODE_NOP));
  EXPECT_EQ(kOpcodeWrite, static_cast<unsigned>(MLX5_OPCODE_RDMA_WRITE));
  EXPECT_EQ(kOpcodeFetchAdd, static_cast<unsigned>(MLX5_OPCODE_ATOMIC_FA));
  EXPECT_EQ(kFlagSignalled, static_cast<unsigned>(MLX5_WQE_CTRL_CQ_UPDATE));
  EXPECT_EQ(sizeof(WorkQueueEntry), static_cast<std::size_t>(MLX5_SEND_WQE_BB));
}

}  // namespace
}  // namespace deep_ep::device::rdma
