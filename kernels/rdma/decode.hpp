// From a work-queue entry or doorbell back to what it asks for, as a device reads it. The simulated NIC, the handler
// `cpu` and tests decode by the same rules, and check alike. Accepted are the entries that the writers of formats.hpp
// make.
#pragma once

#include "kernels/rdma/formats.hpp"

namespace deep_ep::device::rdma {

/// What an entry holds, in host byte order. Keys and addresses are those of the memory that both sides registered.
struct Operation {
  std::uint64_t index = 0;  ///< that the entry must have
  std::uint32_t opcode = 0;
  std::uint32_t modifier = 0;
  std::uint32_t segments = 0;
  std::uint32_t counter = 0;     ///< lowest 16 bits of its index
  std::uint32_t queue_pair = 0;  ///< number
  bool signalled = false;
  std::uint32_t length = 0;
  KeyedAddress local = {};   ///< bytes to be written; of an addition, where the value before goes
  KeyedAddress remote = {};  ///< where
  std::uint64_t add = 0;
  bool valid = false;  ///< a device accepts it; otherwise only the fields up to `length` count
};

/// Decodes the entry that must be number `index` of queue pair `number`.
DEEP_EP_HOST_DEVICE Operation decode(const WorkQueueEntry& entry, std::uint64_t index, std::uint32_t number) {
  const auto word = [](const Vec16& segment, int at) { return swap32(segment.word[at]); };
  const auto wide = [&](const Vec16& segment, int at) {
    return std::uint64_t{word(segment, at)} << 32 | word(segment, at + 1);
  };
  const Vec16 &control = entry.segment[0], &remote = entry.segment[1];
  Operation operation;
  operation.index = index;
  operation.opcode = word(control, 0) & 0xffu;
  operation.modifier = word(control, 0) >> 24;
  operation.counter = word(control, 0) >> 8 & 0xffffu;
  operation.queue_pair = word(control, 1) >> 8;
  operation.segments = word(control, 1) & 0xffu;
  operation.signalled = (control.word[2] >> 24 & kFlagSignalled) != 0;
  const bool adds = operation.opcode == kOpcodeFetchAdd, empty = !adds && operation.segments == 2;
  const Vec16 data = adds ? entry.segment[3] : entry.segment[2];
  operation.remote = {wide(remote, 0), word(remote, 2)};
  if (adds) operation.add = wide(entry.segment[2], 0);
  if (!empty) operation.length = word(data, 0);
  if (!empty) operation.local = {wide(data, 2), word(data, 1)};
  const bool of_bytes = operation.segments == 3 && operation.length != 0;  // a data segment of 0 bytes means 2^31
  const bool good =
      adds ? operation.segments == 4 && operation.length == 8 : operation.opcode == kOpcodeWrite && (empty || of_bytes);
  operation.valid =
      good && operation.modifier == 0 && operation.counter == (index & 0xffffu) && operation.queue_pair == number;
  return operation;
}

/// Memory that a key stands for; addresses start at 0.
struct Region {
  std::byte* base = nullptr;  ///< null: no region has this key
  std::uint64_t bytes = 0;

  /// Null where they do not lie in it.
  DEEP_EP_HOST_DEVICE std::byte* at(std::uint64_t address, std::uint64_t length) const {
    return base != nullptr && address <= bytes && length <= bytes - address ? base + address : nullptr;
  }
};

/// The reason of a failure, as mlx5 devices encode it in the completion entry (byte 55 of an error entry). Wires
/// without an mlx5 device translate into the same codes, so that one table explains every failure. They are those of
/// rdma-core's providers/mlx5/mlx5dv.h (MLX5_CQE_SYNDROME_*); `none` is ours.
enum class Syndrome : std::uint8_t {
  none = 0x00,
  local_length = 0x01,
  local_queue_pair = 0x02,
  local_protection = 0x04,
  flushed = 0x05,
  memory_window_bind = 0x06,
  bad_response = 0x10,
  local_access = 0x11,
  remote_invalid_request = 0x12,
  remote_access = 0x13,
  remote_operation = 0x14,
  transport_retries_exceeded = 0x15,
  receiver_not_ready_retries_exceeded = 0x16,
  remote_aborted = 0x22,
};

/// A device's answer to a valid operation, of which these bytes were found; null: not there, or by a wrong key. A
/// write of no bytes is not checked.
DEEP_EP_HOST_DEVICE constexpr Syndrome answer(const Operation& operation, const std::byte* local,
                                              const std::byte* remote) {
  if (operation.length == 0) return Syndrome::none;
  if (local == nullptr) return Syndrome::local_protection;
  if (operation.opcode == kOpcodeFetchAdd && operation.remote.address % 8 != 0) return Syndrome::remote_invalid_request;
  return remote == nullptr ? Syndrome::remote_access : Syndrome::none;
}

/// Lowest 16 bits of the number of entries that a doorbell announces.
DEEP_EP_HOST_DEVICE constexpr std::uint32_t doorbell_end(std::uint64_t word) {
  return swap32(low_half(word)) >> 8 & 0xffffu;
}

/// A device trusts neither the doorbell `word` nor the doorbell record: of queue pair `number`, whose ring holds
/// `depth` entries, and of which the device is done with those before `known`. Would it take both?
DEEP_EP_HOST_DEVICE constexpr bool doorbell_fits(std::uint64_t word, std::uint32_t record, std::uint64_t known,
                                                 std::uint32_t number, std::uint32_t depth) {
  const std::uint32_t end = doorbell_end(word);
  const bool announced = ((swap32(record) - end) & 0xffffu) <= depth;  // the record is written first
  return announced && high_half(word) == swap32(number << 8) && ((end - low_half(known)) & 0xffffu) <= depth;
}

}  // namespace deep_ep::device::rdma
