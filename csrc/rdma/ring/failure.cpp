#include "csrc/rdma/ring/failure.hpp"

#include "csrc/support/format.hpp"
#include "kernels/common/faults.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep::rdma {

std::string operation_name(std::uint32_t opcode) {
  switch (opcode) {
    case device::rdma::kOpcodeWrite:
      return "RDMA write";
    case device::rdma::kOpcodeFetchAdd:
      return "RDMA fetch-and-add";
    case device::rdma::kOpcodeNop:
      return "RDMA no-operation";
    default:
      return fmt::format("operation with unknown opcode {:#04x}", opcode);
  }
}

std::string describe(const Failure& failure) {
  std::string sentence = operation_name(failure.opcode);
  if (failure.peer >= 0) sentence += fmt::format(" to rank {}", failure.peer);
  if (!failure.device.empty()) sentence += fmt::format(" over {}", failure.device);
  sentence += " failed (";
  if (failure.queue_pair != 0) sentence += fmt::format("queue pair {:#x}, ", failure.queue_pair);
  sentence += fmt::format("entry {})", failure.index);
  if (failure.syndrome != Syndrome::none) {
    sentence += fmt::format(": syndrome {:#04x}, {}", static_cast<unsigned>(failure.syndrome), text(failure.syndrome));
    if (failure.vendor_syndrome != 0) {
      sentence += fmt::format(" (vendor code {:#04x})", static_cast<unsigned>(failure.vendor_syndrome));
    }
  }
  if (!failure.detail.empty()) sentence += ": " + failure.detail;
  return sentence;
}

std::string describe_fault(int rank, const FaultRecord& fault) {
  const RdmaFailure seen = RdmaFailure::unpack(static_cast<std::uint32_t>(fault.field));
  if (seen.syndrome == 0) {
    return fmt::format(
        "rank {}: the completion entry of the queue pair to rank {} makes no sense (opcode {}, entry {} of {}): it is "
        "not "
        "the device's, or was overwritten",
        rank, fault.peer, seen.opcode, fault.expected, fault.seen);
  }
  const Failure failure{.peer = fault.peer,
                        .index = fault.expected,
                        .opcode = seen.opcode,
                        .syndrome = static_cast<Syndrome>(seen.syndrome),
                        .vendor_syndrome = static_cast<std::uint8_t>(seen.vendor_syndrome)};
  return fmt::format("rank {}: {}", rank, describe(failure));
}

}  // namespace deep_ep::rdma
