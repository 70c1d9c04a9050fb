// From a work-queue entry back to what it asks for, as a device reads it. The simulated NIC and the handler `cpu`
// decode by the same rules. Accepted are the entries that the writers of formats.hpp make.
#pragma once

#include "kernels/rdma/formats.hpp"

namespace deep_ep::device::rdma {

/// Why no device would accept an entry, or a doorbell.
enum class Mistake : std::uint32_t {
  none,
  index,       ///< the entry says that it has another number
  queue_pair,  ///< it names another queue pair
  form,        ///< opcode modifier, or number of segments
  opcode,      ///< not one that this library writes
  write_segments,
  write_bytes,  ///< a data segment of 0 bytes means 2^31
  add_segments,
  add_bytes,
  doorbell_queue_pair,  ///< the doorbell names another queue pair
  doorbell_beyond,      ///< more entries than the ring has
  doorbell_record,      ///< the doorbell was rung before its record was written
};

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
  Mistake mistake = Mistake::none;  ///< nothing but the fields above `length` counts otherwise
};

DEEP_EP_HOST_DEVICE constexpr std::uint64_t wide(std::uint32_t high, std::uint32_t low) {
  return static_cast<std::uint64_t>(swap32(high)) << 32 | swap32(low);
}

/// The first two words of an entry, in host byte order.
DEEP_EP_HOST_DEVICE constexpr void take_header(std::uint32_t first, std::uint32_t second, Operation& operation) {
  operation.opcode = first & 0xffu;
  operation.modifier = first >> 24;
  operation.counter = first >> 8 & 0xffffu;
  operation.queue_pair = second >> 8;
  operation.segments = second & 0xffu;
}

namespace detail {

DEEP_EP_HOST_DEVICE void take_data_segment(const Vec16& segment, Operation& operation) {
  operation.length = swap32(segment.word[0]);
  operation.local = {wide(segment.word[2], segment.word[3]), swap32(segment.word[1])};
}

DEEP_EP_HOST_DEVICE Mistake take_write(const WorkQueueEntry& entry, Operation& operation) {
  if (operation.segments == 2) return Mistake::none;  // of no bytes
  if (operation.segments != 3) return Mistake::write_segments;
  take_data_segment(entry.segment[2], operation);
  return operation.length == 0 ? Mistake::write_bytes : Mistake::none;
}

DEEP_EP_HOST_DEVICE Mistake take_fetch_add(const WorkQueueEntry& entry, Operation& operation) {
  if (operation.segments != 4) return Mistake::add_segments;
  operation.add = wide(entry.segment[2].word[0], entry.segment[2].word[1]);
  take_data_segment(entry.segment[3], operation);
  return operation.length == 8 ? Mistake::none : Mistake::add_bytes;
}

}  // namespace detail

/// Decodes the entry that must be number `index` of queue pair `number`.
DEEP_EP_HOST_DEVICE Operation decode(const WorkQueueEntry& entry, std::uint64_t index, std::uint32_t number) {
  Operation operation;
  operation.index = index;
  take_header(swap32(entry.segment[0].word[0]), swap32(entry.segment[0].word[1]), operation);
  operation.signalled = (entry.segment[0].word[2] >> 24 & kFlagSignalled) != 0;
  if (operation.counter != (index & 0xffffu)) {
    operation.mistake = Mistake::index;
  } else if (operation.queue_pair != number) {
    operation.mistake = Mistake::queue_pair;
  } else if (operation.modifier != 0 || operation.segments < 1 || operation.segments > 4) {
    operation.mistake = Mistake::form;
  } else {
    if (operation.segments >= 2) {
      const Vec16& remote = entry.segment[1];
      operation.remote = {wide(remote.word[0], remote.word[1]), swap32(remote.word[2])};
    }
    if (operation.opcode == kOpcodeWrite && operation.segments >= 2) {
      operation.mistake = detail::take_write(entry, operation);
    } else if (operation.opcode == kOpcodeFetchAdd) {
      operation.mistake = detail::take_fetch_add(entry, operation);
    } else {
      operation.mistake = Mistake::opcode;
    }
  }
  return operation;
}

}  // namespace deep_ep::device::rdma
