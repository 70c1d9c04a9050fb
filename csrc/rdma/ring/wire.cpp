#include "csrc/rdma/ring/wire.hpp"

#include "csrc/support/format.hpp"

namespace deep_ep::rdma {

using device::rdma::Mistake;

std::string describe_mistake(const Operation& operation) {
  switch (operation.mistake) {
    case Mistake::none:
      break;
    case Mistake::index:
      return fmt::format("the entry says that it is number {}, not {}", operation.counter, operation.index & 0xffffu);
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

}  // namespace deep_ep::rdma
