#include "tests/rdma/ring/software_nic.hpp"

#include "csrc/support/format.hpp"

namespace deep_ep::test {

namespace {

/// The 64-bit index at or after `before` with these lowest 16 bits.
std::uint64_t extend(std::uint64_t before, std::uint32_t low) {
  return before + ((low - static_cast<std::uint32_t>(before)) & 0xffffu);
}

}  // namespace

void SoftwareNic::add(const RdmaQueuePair& pair) {
  const std::size_t i = rings_.size();
  rings_.push_back({pair, memory_.producer_index(i), memory_.completion(i), *memory_.producer_index(i)});
}

void SoftwareNic::violate(const Ring& ring, const std::string& what) {
  if (violation_.empty()) violation_ = fmt::format("queue pair {:#x}: {}", ring.pair.number, what);
}

void SoftwareNic::see_doorbell(Ring& ring) {
  const std::uint64_t word = __atomic_load_n(ring.pair.doorbell, __ATOMIC_ACQUIRE);
  if (word == 0) return;
  const std::uint32_t record = __atomic_load_n(ring.pair.doorbell_record, __ATOMIC_ACQUIRE);
  std::uint64_t& rung = *ring.producer_index;
  if (options_.loses_doorbells) {
    if (word != ring.missed && wire_.below(4) == 0) ring.missed = word;
    if (word == ring.missed) {
      // Recovery looks at the record, which may even be ahead of the doorbell.
      if (wire_.below(200) == 0) rung = std::max(rung, extend(ring.completed, device::rdma::swap32(record)));
      return;
    }
  }
  const std::uint64_t end = extend(ring.completed, device::rdma::doorbell_end(word));
  if (end < rung) {
    // A record that was read in recovery may be ahead; otherwise doorbells only grow.
    if (!options_.loses_doorbells) violate(ring, fmt::format("doorbell went from {} to {}", rung, end));
    return;
  }
  if (!device::rdma::doorbell_fits(word, record, ring.completed, ring.pair.number, ring.pair.depth)) {
    return violate(ring, fmt::format("no device takes doorbell {:#x} with record {:#x}", word, record));
  }
  rung = end;
}

void SoftwareNic::see_completion(Ring& ring) {
  const std::uint32_t tail = ring.completion->tail;
  switch (device::rdma::tail_opcode(tail)) {
    case device::rdma::kCompletionOk: {
      const std::uint64_t completed = extend(ring.completed, device::rdma::tail_counter(tail) + 1);
      if (completed == ring.completed) return;
      ring.completed = completed;
      // Until now the entry was the device's.
      const rdma::Operation operation = device::rdma::decode(ring.pair.ring[(completed - 1) & (ring.pair.depth - 1)],
                                                             completed - 1, ring.pair.number);
      if (!operation.valid) violate(ring, fmt::format("entry {} was overwritten", completed - 1));
      return;
    }
    case device::rdma::kCompletionError: {
      const std::uint64_t rung = *ring.producer_index;
      const bool is_last = device::rdma::tail_counter(tail) == ((rung - 1) & 0xffffu);
      if (!options_.flush_overwrites || is_last) return;
      ring.completion->syndrome = static_cast<std::uint8_t>(rdma::Syndrome::flushed);
      ring.completion->tail = device::rdma::tail_word(rung - 1, device::rdma::kCompletionError);
    }
  }
}

void SoftwareNic::step() {
  if (wire_.below(2) == 0) see_doorbell(rings_[wire_.below(rings_.size())]);
  handler_.step();
  for (Ring& ring : rings_) see_completion(ring);
}

}  // namespace deep_ep::test
