#include "csrc/rdma/ring/failure.hpp"

#include "csrc/support/format.hpp"
#include "kernels/common/faults.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep::rdma {

std::string_view text(Syndrome syndrome) {
  switch (syndrome) {
    case Syndrome::none:
      return "success";
    case Syndrome::local_length:
      return "local length error: the message is longer than the queue pair allows";
    case Syndrome::local_queue_pair:
      return "local queue pair operation error: the device does not accept the work-queue entry";
    case Syndrome::local_protection:
      return "local protection error: the local key is wrong, or the bytes lie outside the registered memory";
    case Syndrome::flushed:
      return "flushed: the queue pair had failed before; an earlier operation has the cause";
    case Syndrome::memory_window_bind:
      return "memory window bind error";
    case Syndrome::bad_response:
      return "bad response: the peer answered with an unexpected packet";
    case Syndrome::local_access:
      return "local access error: the registered memory does not permit this";
    case Syndrome::remote_invalid_request:
      return "remote invalid request: the peer's queue pair does not permit the operation (remote write or atomics not "
             "enabled), or the address of an atomic is not a multiple of 8";
    case Syndrome::remote_access:
      return "remote access error: the remote key is wrong, or the bytes lie outside the memory that the peer "
             "registered";
    case Syndrome::remote_operation:
      return "remote operation error: the peer's device could not finish the request";
    case Syndrome::transport_retries_exceeded:
      return "transport retries exceeded: the peer does not answer (process gone, link down, wrong GID or route)";
    case Syndrome::receiver_not_ready_retries_exceeded:
      return "receiver-not-ready retries exceeded: the peer has no receive posted";
    case Syndrome::remote_aborted:
      return "remote aborted: the peer's device gave up the request";
  }
  return "unknown syndrome";
}

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
  if (failure.of_device) return fmt::format("RDMA device {} {}", failure.device, failure.detail);
  std::string sentence = operation_name(failure.opcode);
  if (failure.peer >= 0) sentence += fmt::format(" to rank {}", failure.peer);
  if (!failure.device.empty()) sentence += fmt::format(" over {}", failure.device);
  std::string place;
  if (failure.queue_pair != 0) place = fmt::format("queue pair {:#x}", failure.queue_pair);
  if (failure.index) place += fmt::format("{}entry {}", place.empty() ? "" : ", ", *failure.index);
  sentence += place.empty() ? " failed" : fmt::format(" failed ({})", place);
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
  const bool knows_entry = fault.seen != 0;  // so many had been posted
  if (seen.syndrome == 0) {
    const std::string entry = knows_entry ? fmt::format(", entry {} of {}", fault.expected, fault.seen) : std::string();
    return fmt::format(
        "rank {}: the completion entry of the queue pair to rank {} makes no sense (opcode {}{}): it is not the "
        "device's, or was overwritten",
        rank, fault.peer, seen.opcode, entry);
  }
  const Failure failure{.peer = fault.peer,
                        .index = knows_entry ? std::optional(fault.expected) : std::nullopt,
                        .opcode = seen.opcode,
                        .syndrome = static_cast<Syndrome>(seen.syndrome),
                        .vendor_syndrome = static_cast<std::uint8_t>(seen.vendor_syndrome)};
  return fmt::format("rank {}: {}", rank, describe(failure));
}

}  // namespace deep_ep::rdma
