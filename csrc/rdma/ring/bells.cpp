#include "csrc/rdma/ring/bells.hpp"

#include <bit>
#include <memory>
#include <utility>

#include "csrc/memory/executor_memory.hpp"
#include "csrc/rdma/ring/polling.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {
namespace {

constexpr std::size_t kPage = 65536;  ///< the largest of a host

/// Earlier stores come before this one, also for a device; and the device gets it at once, not when a write-combining
/// buffer is full.
void store_to_device(volatile std::uint64_t* reg, std::uint64_t word) {
#if defined(__aarch64__)
  asm volatile("dsb sy" ::: "memory");
  __atomic_store_n(reg, word, __ATOMIC_RELEASE);
  asm volatile("dsb sy" ::: "memory");
#elif defined(__x86_64__)
  asm volatile("sfence" ::: "memory");
  __atomic_store_n(reg, word, __ATOMIC_RELEASE);
  asm volatile("sfence" ::: "memory");
#else
#error "no order of stores to devices is known for this processor"
#endif
}

}  // namespace

Bells::Bells(std::shared_ptr<Executor> executor, std::size_t rings, std::uint32_t depth)
    : rings_(rings),
      bits_(static_cast<std::uint32_t>(std::bit_width(rings * depth - 1))),
      bells_(pinned_memory<std::uint64_t>(executor, sizeof(std::uint64_t) << bits_)),
      left_(device_copy<std::uint64_t>(executor, {0})),
      record_memory_(pinned_memory<std::byte>(executor, record_bytes() + kPage)) {
  void* begin = record_memory_.get();
  std::size_t room = record_bytes() + kPage;
  records_ = static_cast<std::uint32_t*>(std::align(kPage, record_bytes(), begin, room));
  if (rings > device::rdma::kMostBellRings) {
    fail<InvalidArgument>("{} queue pairs for one thread that rings, allowed: {}", rings, device::rdma::kMostBellRings);
  }
}

std::size_t Bells::record_bytes() const {
  const std::size_t bytes = rings_.size() * 2 * sizeof(std::uint32_t);
  return (bytes + kPage - 1) / kPage * kPage;
}

void Bells::connect(std::size_t ring, RdmaQueuePair& pair, volatile std::uint64_t* reg) {
  rings_.at(ring) = {reg, pair.number};
  pair.kind = RdmaDoorbell::bell;
  pair.doorbell = bells_.get();
  pair.bells_left = left_.get();
  pair.bell_bits = bits_;
  pair.bell_ring = static_cast<std::uint32_t>(ring);
}

std::jthread Bells::thread(std::vector<int> cpus) {
  return std::jthread([this, cpus = std::move(cpus)](const std::stop_token& stop) {
    poll(stop, cpus, /*for_device=*/true, [this] { return step(); });
  });
}

bool Bells::step() {
  const std::uint64_t place = next_ & ((std::uint64_t{1} << bits_) - 1);
  const std::uint64_t bell = __atomic_load_n(bells_.get() + place, __ATOMIC_ACQUIRE);
  // A word that is not the next bell is the bell that was read from this place before, or zero.
  const std::uint32_t lap = device::rdma::high_half(bell);
  const auto expected = static_cast<std::uint32_t>((next_ >> bits_) + 1);
  const std::uint32_t ring = device::rdma::low_half(bell) >> 16;
  // One that names no ring was overwritten, too.
  if (lap != expected || ring >= rings_.size()) {
    if (lap != expected - 1 && !lost_.exchange(true)) log::error("RDMA: a doorbell was overwritten before it was rung");
    return false;
  }
  const Ring& to = rings_[ring];
  __atomic_store_n(record(ring), device::rdma::record_word(device::rdma::low_half(bell)), __ATOMIC_RELEASE);
  store_to_device(to.reg, device::rdma::doorbell_word(device::rdma::low_half(bell), to.number));
  ++next_;
  return true;
}

}  // namespace deep_ep::rdma
