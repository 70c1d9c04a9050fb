// Work-queue entries (WQE) and completion entries (CQE) of mlx5 devices, as far as this library uses them: RC queue
// pairs, entries of one 64-byte block. Offsets and codes are those of rdma-core's providers/mlx5/mlx5dv.h; a test
// compares every byte with that header. Host and GPU build them with the same functions.
//
// All fields of several bytes are big-endian. An entry is a sequence of 16-byte segments, counted in the control
// segment:
//   control   +0 be32 entry index << 8 | opcode   +4 be32 queue pair << 8 | segments   +11 u8 flags   +12 immediate
//   remote    +0 be64 address                     +8 be32 remote key
//   data      +0 be32 bytes   +4 be32 local key   +8 be64 address
//   atomic    +0 be64 addend                      +8 be64 (compare and swap only)
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/primitives/target.hpp"

namespace deep_ep::device::rdma {

/// One block of a send queue.
struct alignas(64) WorkQueueEntry {
  Vec16 segment[4];
};
static_assert(sizeof(WorkQueueEntry) == 64);

/// What a device writes when an entry is complete. `tail` holds, byte by byte: entry counter (be16), signature, opcode
/// << 4 with the owner bit. It is written last and read as one word.
struct alignas(64) CompletionEntry {
  std::uint8_t reserved[54];
  std::uint8_t vendor_syndrome;  ///< of an error entry
  std::uint8_t syndrome;         ///< of an error entry
  std::uint32_t opcode_number;   ///< be32 opcode of the work-queue entry << 24 | queue pair
  std::uint32_t tail;
};
static_assert(sizeof(CompletionEntry) == 64 && offsetof(CompletionEntry, syndrome) == 55 &&
              offsetof(CompletionEntry, opcode_number) == 56 && offsetof(CompletionEntry, tail) == 60);

inline constexpr std::uint32_t kOpcodeNop = 0x00;
inline constexpr std::uint32_t kOpcodeWrite = 0x08;
inline constexpr std::uint32_t kOpcodeFetchAdd = 0x12;

inline constexpr std::uint32_t kCompletionOk = 0;              ///< of an operation of the send queue
inline constexpr std::uint32_t kCompletionError = 13;          ///< of an operation of the send queue
inline constexpr std::uint32_t kCompletionNotYetWritten = 15;  ///< what the memory holds before the first completion

inline constexpr std::uint32_t kFlagSignalled = 0x08;  ///< always a completion entry; otherwise for errors only

// Both targets are little-endian (every GPU; the hosts that the library supports).
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

DEEP_EP_HOST_DEVICE constexpr std::uint32_t swap32(std::uint32_t v) {
  return v >> 24 | (v >> 8 & 0xff00u) | (v << 8 & 0xff0000u) | v << 24;
}
DEEP_EP_HOST_DEVICE constexpr std::uint32_t high_half(std::uint64_t v) { return static_cast<std::uint32_t>(v >> 32); }
DEEP_EP_HOST_DEVICE constexpr std::uint32_t low_half(std::uint64_t v) { return static_cast<std::uint32_t>(v); }

/// Registered memory: the address that the key was registered for, plus an offset.
struct KeyedAddress {
  std::uint64_t address = 0;
  std::uint32_t key = 0;
};

DEEP_EP_HOST_DEVICE Vec16 control_segment(std::uint64_t index, std::uint32_t number, std::uint32_t opcode,
                                          std::uint32_t segments) {
  return {{swap32((static_cast<std::uint32_t>(index) & 0xffffu) << 8 | opcode), swap32(number << 8 | segments), 0, 0}};
}
DEEP_EP_HOST_DEVICE Vec16 remote_segment(const KeyedAddress& remote) {
  return {{swap32(high_half(remote.address)), swap32(low_half(remote.address)), swap32(remote.key), 0}};
}
DEEP_EP_HOST_DEVICE Vec16 data_segment(const KeyedAddress& local, std::uint32_t bytes) {
  return {{swap32(bytes), swap32(local.key), swap32(high_half(local.address)), swap32(low_half(local.address))}};
}

// ---- Whole entries: number `index` of queue pair `number`, which has 24 bits; the device knows the lowest 16 of the
// index. Segments behind the last one keep what they held; the device does not look at them ----

/// RDMA write of 0 to 2^30 bytes. Without bytes it has no data segment: a segment of 0 bytes would mean 2^31.
DEEP_EP_HOST_DEVICE void write_entry(WorkQueueEntry& entry, std::uint64_t index, std::uint32_t number,
                                     const KeyedAddress& remote, const KeyedAddress& local, std::uint32_t bytes) {
  entry.segment[0] = control_segment(index, number, kOpcodeWrite, bytes == 0 ? 2 : 3);
  entry.segment[1] = remote_segment(remote);
  if (bytes != 0) entry.segment[2] = data_segment(local, bytes);
}

/// Adds to the 8-byte word at `remote` (a multiple of 8); the value before goes to the 8 bytes at `sink`.
DEEP_EP_HOST_DEVICE void fetch_add_entry(WorkQueueEntry& entry, std::uint64_t index, std::uint32_t number,
                                         const KeyedAddress& remote, const KeyedAddress& sink, std::uint64_t add) {
  entry.segment[0] = control_segment(index, number, kOpcodeFetchAdd, 4);
  entry.segment[1] = remote_segment(remote);
  entry.segment[2] = {{swap32(high_half(add)), swap32(low_half(add)), 0, 0}};
  entry.segment[3] = data_segment(sink, 8);
}

/// Asks for a completion of an entry that is not yet rung.
DEEP_EP_HOST_DEVICE void signal_entry(WorkQueueEntry& entry) { entry.segment[0].word[2] = kFlagSignalled << 24; }

/// What is stored to the doorbell register: entries before `end` may be read.
DEEP_EP_HOST_DEVICE constexpr std::uint64_t doorbell_word(std::uint64_t end, std::uint32_t number) {
  return static_cast<std::uint64_t>(swap32(number << 8)) << 32 |
         swap32((static_cast<std::uint32_t>(end) & 0xffffu) << 8);
}
/// What is stored to the doorbell record, from which the device recovers lost doorbells.
DEEP_EP_HOST_DEVICE constexpr std::uint32_t record_word(std::uint64_t end) {
  return swap32(static_cast<std::uint32_t>(end) & 0xffffu);
}

DEEP_EP_HOST_DEVICE constexpr std::uint32_t tail_word(std::uint64_t index, std::uint32_t opcode) {
  return opcode << 28 | swap32(static_cast<std::uint32_t>(index) << 16);
}
DEEP_EP_HOST_DEVICE constexpr std::uint32_t tail_opcode(std::uint32_t tail) { return tail >> 28; }
/// Lowest 16 bits of the index of the entry that completed.
DEEP_EP_HOST_DEVICE constexpr std::uint32_t tail_counter(std::uint32_t tail) { return swap32(tail) >> 16; }

}  // namespace deep_ep::device::rdma
