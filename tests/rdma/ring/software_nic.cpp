#include "tests/rdma/ring/software_nic.hpp"

#include <endian.h>

#include "csrc/rdma/ring/wire.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep::test {

using device::rdma::CompletionEntry;
using rdma::Syndrome;

namespace {

/// The 64-bit index at or after `before` with these lowest 16 bits.
std::uint64_t extend(std::uint64_t before, std::uint32_t low) {
  return before + ((low - static_cast<std::uint32_t>(before)) & 0xffffu);
}

void write_completion(const RdmaQueuePair& pair, std::uint64_t index, Syndrome syndrome, std::uint8_t vendor) {
  auto& entry = const_cast<CompletionEntry&>(*pair.completion);
  const bool failed = syndrome != Syndrome::none;
  const auto& written = pair.ring[index & (pair.depth - 1)];
  entry.syndrome = static_cast<std::uint8_t>(syndrome);
  entry.vendor_syndrome = vendor;
  entry.opcode_number = htobe32((be32toh(written.segment[0].word[0]) & 0xffu) << 24 | pair.number);
  const unsigned char tail[4] = {static_cast<unsigned char>(index >> 8), static_cast<unsigned char>(index), 0,
                                 static_cast<unsigned char>(failed ? 13 << 4 : 0)};
  std::uint32_t word;
  __builtin_memcpy(&word, tail, sizeof word);
  __atomic_store_n(&entry.tail, word, __ATOMIC_RELEASE);
}

}  // namespace

void SoftwareNic::add(const RdmaQueuePair& pair, std::uint64_t first_index) {
  wire_.add_queue_pair(pair.number);
  rings_.push_back({pair, first_index, first_index, first_index});
}

void SoftwareNic::violate(const Ring& ring, const std::string& what) {
  if (violation_.empty()) violation_ = fmt::format("queue pair {:#x}: {}", ring.pair.number, what);
}

void SoftwareNic::check_record(Ring& ring, std::uint64_t end) {
  const std::uint32_t record = be32toh(__atomic_load_n(ring.pair.doorbell_record, __ATOMIC_ACQUIRE));
  if (extend(ring.completed, record) < end) violate(ring, "the doorbell came before its record");
}

void SoftwareNic::see_doorbell(Ring& ring) {
  const std::uint64_t word = __atomic_load_n(ring.pair.doorbell, __ATOMIC_ACQUIRE);
  if (word == 0) return;
  unsigned char bytes[8];
  __builtin_memcpy(bytes, &word, sizeof bytes);
  const std::uint32_t number = static_cast<std::uint32_t>(bytes[4] << 16 | bytes[5] << 8 | bytes[6]);
  if (number != ring.pair.number) return violate(ring, fmt::format("doorbell of queue pair {:#x}", number));
  if (options_.loses_doorbells) {
    if (word != ring.missed && wire_.below(4) == 0) ring.missed = word;
    if (word == ring.missed) {
      if (wire_.below(200) != 0) return;
      // Recovery looks at the record, which may even be ahead of the doorbell.
      const std::uint32_t record = be32toh(__atomic_load_n(ring.pair.doorbell_record, __ATOMIC_ACQUIRE));
      ring.rung = std::max(ring.rung, extend(ring.completed, record));
      return;
    }
  }
  const std::uint64_t end = extend(ring.completed, static_cast<std::uint32_t>(bytes[1] << 8 | bytes[2]));
  if (end < ring.rung) {
    // A record that was read in recovery may be ahead; otherwise doorbells only grow.
    if (!options_.loses_doorbells) violate(ring, fmt::format("doorbell went from {} to {}", ring.rung, end));
    return;
  }
  if (end - ring.completed > ring.pair.depth) {
    return violate(ring, fmt::format("doorbell {} while only {} entries are complete", end, ring.completed));
  }
  check_record(ring, end);
  ring.rung = end;
}

void SoftwareNic::fetch(Ring& ring) {
  if (ring.fetched == ring.rung) return;
  if (ring.failed && !options_.flush_overwrites) return;
  const rdma::Operation operation =
      device::rdma::decode(ring.pair.ring[ring.fetched & (ring.pair.depth - 1)], ring.fetched, ring.pair.number);
  if (operation.mistake != device::rdma::Mistake::none) {
    ring.failed = true;
    write_completion(ring.pair, ring.fetched, Syndrome::local_queue_pair, 0);
    return violate(ring, fmt::format("entry {}: {}", ring.fetched, rdma::describe_mistake(operation)));
  }
  ring.fetched += wire_.post({&operation, 1});
}

void SoftwareNic::complete(const rdma::WireCompletion& completion) {
  for (Ring& ring : rings_) {
    if (ring.pair.number != completion.queue_pair) continue;
    if (ring.failed && !options_.flush_overwrites) return;
    // Until now the entry was the device's.
    const std::string mistake = rdma::describe_mistake(device::rdma::decode(
        ring.pair.ring[completion.index & (ring.pair.depth - 1)], completion.index, ring.pair.number));
    if (!mistake.empty()) violate(ring, fmt::format("entry {} was overwritten: {}", completion.index, mistake));
    ring.failed = completion.syndrome != Syndrome::none;
    if (!ring.failed) ring.completed = completion.index + 1;
    write_completion(ring.pair, completion.index, completion.syndrome, completion.vendor_syndrome);
  }
}

void SoftwareNic::step() {
  if (rings_.empty()) return;
  Ring& ring = rings_[wire_.below(rings_.size())];
  if (wire_.below(2) == 0) see_doorbell(ring);
  for (std::uint64_t count = wire_.below(6); count != 0; --count) fetch(ring);
  rdma::WireCompletion completions[8];
  const std::size_t count = wire_.poll(completions);
  for (std::size_t i = 0; i < count; ++i) complete(completions[i]);
}

}  // namespace deep_ep::test
