#include "csrc/rdma/ring/failure.hpp"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "csrc/support/format.hpp"
#include "kernels/common/faults.hpp"

namespace deep_ep::rdma {

std::string_view text(Syndrome syndrome) {
  static constexpr std::pair<Syndrome, std::string_view> kTexts[] = {
      {Syndrome::none, "success"},
      {Syndrome::local_length, "local length error: the message is longer than the queue pair allows"},
      {Syndrome::local_queue_pair, "local queue pair operation error: the device does not accept the work-queue entry"},
      {Syndrome::local_protection,
       "local protection error: the local key is wrong, or the bytes lie outside the registered memory"},
      {Syndrome::flushed, "flushed: the queue pair had failed before; an earlier operation has the cause"},
      {Syndrome::memory_window_bind, "memory window bind error"},
      {Syndrome::bad_response, "bad response: the peer answered with an unexpected packet"},
      {Syndrome::local_access, "local access error: the registered memory does not permit this"},
      {Syndrome::remote_invalid_request,
       "remote invalid request: the peer's queue pair does not permit the operation (remote write or atomics not "
       "enabled), or the address of an atomic is not a multiple of 8"},
      {Syndrome::remote_access,
       "remote access error: the remote key is wrong, or the bytes lie outside the memory that the peer registered"},
      {Syndrome::remote_operation, "remote operation error: the peer's device could not finish the request"},
      {Syndrome::transport_retries_exceeded,
       "transport retries exceeded: the peer does not answer (process gone, link down, wrong GID or route)"},
      {Syndrome::receiver_not_ready_retries_exceeded,
       "receiver-not-ready retries exceeded: the peer has no receive posted"},
      {Syndrome::remote_aborted, "remote aborted: the peer's device gave up the request"},
  };
  const auto* found = std::ranges::find(kTexts, syndrome, [](const auto& one) { return one.first; });
  return found == std::end(kTexts) ? "unknown syndrome" : found->second;
}

std::string describe(const Failure& failure) {
  const auto [syndrome, vendor_syndrome, opcode] = failure.why;
  std::string sentence = opcode == device::rdma::kOpcodeWrite      ? "RDMA write"
                         : opcode == device::rdma::kOpcodeFetchAdd ? "RDMA fetch-and-add"
                         : opcode == device::rdma::kOpcodeNop
                             ? "RDMA no-operation"
                             : fmt::format("operation with unknown opcode {:#04x}", opcode);
  sentence += fmt::format(" to rank {}", failure.peer);
  if (!failure.device.empty()) sentence += fmt::format(" over {}", failure.device);
  sentence += " failed";
  std::vector<std::string> place;
  if (failure.queue_pair != 0) place.push_back(fmt::format("queue pair {:#x}", failure.queue_pair));
  if (failure.index) place.push_back(fmt::format("entry {}", *failure.index));
  if (!place.empty()) sentence += fmt::format(" ({})", fmt::join(place, ", "));
  if (syndrome != 0) sentence += fmt::format(": syndrome {:#04x}, {}", syndrome, text(static_cast<Syndrome>(syndrome)));
  if (vendor_syndrome != 0) sentence += fmt::format(" (vendor code {:#04x})", vendor_syndrome);
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
  const auto index = knows_entry ? std::optional(fault.expected) : std::nullopt;
  return fmt::format("rank {}: {}", rank, describe({.peer = fault.peer, .index = index, .why = seen}));
}

}  // namespace deep_ep::rdma
