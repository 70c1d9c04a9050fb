#include "csrc/rdma/ring/wire.hpp"

#include "csrc/support/format.hpp"

namespace deep_ep::rdma {

using device::rdma::Mistake;
using device::rdma::Operation;

std::string describe_mistake(const Operation& operation, std::uint64_t index) {
  switch (operation.mistake) {
    case Mistake::none:
      break;
    case Mistake::index:
      return fmt::format("the entry says that it is number {}, not {}", operation.counter, index & 0xffffu);
    case Mistake::queue_pair:
      return fmt::format("the entry names queue pair {:#x}", operation.queue_pair);
    case Mistake::form:
      return fmt::format("opcode modifier {} and {} segments, expected 0 and 1 to 4", operation.modifier,
                         operation.segments);
    case Mistake::opcode:
      return fmt::format("opcode {:#04x} with {} segments is not one that this library writes", operation.opcode,
                         operation.segments);
    case Mistake::write_segments:
      return fmt::format("an RDMA write of {} segments, expected 3", operation.segments);
    case Mistake::write_bytes:
      return "an RDMA write whose data segment has 0 bytes, which means 2^31";
    case Mistake::add_segments:
      return fmt::format("a fetch-and-add of {} segments, expected 4", operation.segments);
    case Mistake::add_bytes:
      return fmt::format("a fetch-and-add of {} bytes, expected 8", operation.length);
    case Mistake::doorbell_queue_pair:
      return "the doorbell names another queue pair";
    case Mistake::doorbell_beyond:
      return "the doorbell announces more entries than the ring has";
    case Mistake::doorbell_record:
      return "the doorbell was rung before its record was written";
  }
  return {};
}

DecodedEntry decode_entry(const device::rdma::WorkQueueEntry& entry, std::uint64_t index, std::uint32_t queue_pair) {
  const Operation read = device::rdma::decode(entry, index, queue_pair);
  DecodedEntry decoded{.opcode = read.opcode, .operation = {}, .mistake = describe_mistake(read, index)};
  WireOperation& operation = decoded.operation;
  operation.queue_pair = queue_pair;
  operation.id = index;
  operation.signalled = read.signalled || !decoded.mistake.empty();
  if (!decoded.mistake.empty()) return decoded;
  operation.length = read.length;
  operation.local_key = read.local.key;
  operation.local_address = read.local.address;
  operation.remote_key = read.remote.key;
  operation.remote_address = read.remote.address;
  operation.add = read.add;
  if (read.opcode == device::rdma::kOpcodeFetchAdd) operation.kind = WireOperationKind::fetch_add;
  return decoded;
}

}  // namespace deep_ep::rdma
