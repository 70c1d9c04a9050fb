#include "csrc/rdma/ring/gpu_nic_handler.hpp"

#include <algorithm>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {

void GpuNicHandler::add(const HandledRing& ring) {
  const std::lock_guard lock(mutex_);
  if (std::any_of(rings_.begin(), rings_.end(), [&](const HandledRing& r) { return r.number == ring.number; })) {
    fail<InvalidArgument>("queue pair {:#x} is served already; allowed: a number that no other ring has", ring.number);
  }
  rings_.push_back(ring);
}

void GpuNicHandler::remove(std::uint32_t number) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase_if(rings_, [&](const HandledRing& ring) { return ring.number == number; });
}

std::optional<Failure> GpuNicHandler::failure() const {
  const std::lock_guard lock(mutex_);
  for (const HandledRing& ring : rings_) {
    if (ring.completion == nullptr) continue;
    const std::uint32_t tail = __atomic_load_n(&ring.completion->tail, __ATOMIC_ACQUIRE);
    if (device::rdma::tail_opcode(tail) != device::rdma::kCompletionError) continue;
    // Of the index the device tells the lowest 16 bits.
    return Failure{.peer = ring.peer,
                   .device = ring.device,
                   .queue_pair = ring.number,
                   .index = device::rdma::tail_counter(tail),
                   .opcode = device::rdma::swap32(ring.completion->opcode_number) >> 24,
                   .syndrome = static_cast<Syndrome>(ring.completion->syndrome),
                   .vendor_syndrome = ring.completion->vendor_syndrome};
  }
  return std::nullopt;
}

}  // namespace deep_ep::rdma
