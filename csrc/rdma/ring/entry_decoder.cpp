#include "csrc/rdma/ring/entry_decoder.hpp"

#include <cstring>

#include "csrc/support/format.hpp"

namespace deep_ep::rdma {
namespace {

using device::rdma::kOpcodeFetchAdd;
using device::rdma::kOpcodeNop;
using device::rdma::kOpcodeWrite;
using device::rdma::swap32;

std::uint64_t wide(std::uint32_t high, std::uint32_t low) {
  return static_cast<std::uint64_t>(swap32(high)) << 32 | swap32(low);
}

/// A local address, and how many bytes there.
void take_data_segment(const device::Vec16& segment, WireOperation& operation) {
  operation.length = swap32(segment.word[0]);
  operation.local_key = swap32(segment.word[1]);
  operation.local_address = wide(segment.word[2], segment.word[3]);
}

std::string decode_write(const device::rdma::WorkQueueEntry& entry, std::uint32_t segments, WireOperation& operation) {
  if (segments == 2) return {};
  const std::uint32_t first = swap32(entry.segment[2].word[0]);
  if ((first & device::rdma::kInlineBit) == 0) {
    if (segments != 3) return fmt::format("an RDMA write of {} segments, expected 3", segments);
    operation.kind = WireOperationKind::write;
    take_data_segment(entry.segment[2], operation);
    if (operation.length == 0) return "an RDMA write whose data segment has 0 bytes, which means 2^31";
    return {};
  }
  operation.length = first & ~device::rdma::kInlineBit;
  const std::uint32_t needed = operation.length <= 12 ? 3 : 4;
  if (operation.length > kMaxInlineBytes || segments != needed) {
    return fmt::format("an inline RDMA write of {} bytes in {} segments", operation.length, segments);
  }
  std::memcpy(operation.inline_bytes.data(), &entry.segment[2].word[1], 12);
  if (segments == 4) std::memcpy(operation.inline_bytes.data() + 12, &entry.segment[3], 16);
  return {};
}

std::string decode_fetch_add(const device::rdma::WorkQueueEntry& entry, std::uint32_t segments,
                             WireOperation& operation) {
  if (segments != 4) return fmt::format("a fetch-and-add of {} segments, expected 4", segments);
  operation.kind = WireOperationKind::fetch_add;
  operation.add = wide(entry.segment[2].word[0], entry.segment[2].word[1]);
  take_data_segment(entry.segment[3], operation);
  if (operation.length != 8) return fmt::format("a fetch-and-add of {} bytes, expected 8", operation.length);
  return {};
}

}  // namespace

DecodedEntry decode_entry(const device::rdma::WorkQueueEntry& entry, std::uint64_t index, std::uint32_t queue_pair) {
  const std::uint32_t first = swap32(entry.segment[0].word[0]);
  const std::uint32_t second = swap32(entry.segment[0].word[1]);
  const std::uint32_t segments = second & 0xffu;
  DecodedEntry decoded{.opcode = first & 0xffu};
  WireOperation& operation = decoded.operation;
  operation.queue_pair = queue_pair;
  operation.id = index;
  operation.kind = WireOperationKind::write_inline;
  operation.signalled = (entry.segment[0].word[2] >> 24 & device::rdma::kFlagSignalled) != 0;
  if (segments >= 2) {
    operation.remote_address = wide(entry.segment[1].word[0], entry.segment[1].word[1]);
    operation.remote_key = swap32(entry.segment[1].word[2]);
  }

  if ((first >> 8 & 0xffffu) != (index & 0xffffu)) {
    decoded.mistake = fmt::format("the entry says that it is number {}, not {}", first >> 8 & 0xffffu, index & 0xffffu);
  } else if (second >> 8 != queue_pair) {
    decoded.mistake = fmt::format("the entry names queue pair {:#x}", second >> 8);
  } else if (first >> 24 != 0 || segments < 1 || segments > 4) {
    decoded.mistake = fmt::format("opcode modifier {} and {} segments, expected 0 and 1 to 4", first >> 24, segments);
  } else if (decoded.opcode == kOpcodeWrite && segments >= 2) {
    decoded.mistake = decode_write(entry, segments, operation);
  } else if (decoded.opcode == kOpcodeFetchAdd) {
    decoded.mistake = decode_fetch_add(entry, segments, operation);
  } else if (decoded.opcode != kOpcodeNop) {
    decoded.mistake =
        fmt::format("opcode {:#04x} with {} segments is not one that this library writes", decoded.opcode, segments);
  }
  if (!decoded.mistake.empty()) {
    operation = WireOperation{
        .queue_pair = queue_pair, .id = index, .kind = WireOperationKind::write_inline, .signalled = true};
  }
  return decoded;
}

}  // namespace deep_ep::rdma
