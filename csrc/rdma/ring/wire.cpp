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
      return fmt::format(
          "opcode {:#04x}, modifier {}, {} segments, data of {} bytes: this library writes no such entry",
          operation.opcode, operation.modifier, operation.segments, operation.length);
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
