#include "tests/rdma/ring/adversarial_wire.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "deep_ep/error.hpp"

namespace deep_ep::test {

using rdma::Operation;
using rdma::Syndrome;

std::byte* AdversarialWire::find(const device::rdma::KeyedAddress& place) const {
  return regions_.at(place.key) + place.address;
}

Syndrome AdversarialWire::validate(Pair& pair, const Operation& operation, std::uint8_t& vendor) {
  if (pair.failed) return Syndrome::flushed;
  for (const rdma::WireCompletion& planted : pair.planted) {
    if (planted.index != operation.index) continue;
    vendor = planted.vendor_syndrome;
    return planted.syndrome;
  }
  return Syndrome::none;
}

void AdversarialWire::post(std::size_t ring, std::span<const Operation> operations) {
  for (const Operation& operation : operations) {
    const auto found = pairs_.find(operation.queue_pair);
    if (found == pairs_.end()) throw std::invalid_argument("unknown queue pair");
    Pair& pair = found->second;
    pair.ring = ring;
    Pending pending{.operation = operation};
    pending.syndrome = validate(pair, operation, pending.vendor);
    pair.failed |= pending.syndrome != Syndrome::none;
    if (operation.opcode != device::rdma::kOpcodeFetchAdd) {
      for (std::uint32_t offset = 0; offset < operation.length; offset += kChunk) pending.chunks.push_back(offset);
    }
    pair.pending.push_back(std::move(pending));
  }
  EXPECT_LE(pairs_[operations.front().queue_pair].pending.size(), most);
}

void AdversarialWire::place(const Operation& operation, std::uint32_t offset) {
  const std::uint32_t bytes = std::min(kChunk, operation.length - offset);
  std::memcpy(find(operation.remote) + offset, find(operation.local) + offset, bytes);
}

void AdversarialWire::add(const Operation& operation) {
  std::byte* word = find(operation.remote);
  const std::uint64_t before =
      __atomic_fetch_add(reinterpret_cast<std::uint64_t*>(word), operation.add, __ATOMIC_ACQ_REL);
  std::memcpy(find(operation.local), &before, sizeof before);
  if (on_add) on_add(operation.queue_pair, before + operation.add);
}

/// Bytes of any write that is under way, even of one after an addition; the addition itself when everything before it
/// is done.
void AdversarialWire::execute_some(Pair& pair) {
  bool all_before = true;
  for (Pending& pending : pair.pending) {
    if (pending.syndrome != Syndrome::none) return;  // it and all behind it are never executed
    if (!pending.executed) {
      const bool adds = pending.operation.opcode == device::rdma::kOpcodeFetchAdd;
      const bool may = !adds || all_before;
      if (may && below(3) != 0) {
        if (adds) {
          add(pending.operation);
        } else if (!pending.chunks.empty()) {
          const std::size_t which = below(pending.chunks.size());
          place(pending.operation, pending.chunks[which]);
          pending.chunks.erase(pending.chunks.begin() + static_cast<std::ptrdiff_t>(which));
        }
        pending.executed = adds || pending.chunks.empty();
        pair.executed += pending.executed ? 1 : 0;
        if (below(4) == 0) return;
      }
    }
    all_before = all_before && pending.executed;
  }
}

void AdversarialWire::retire(Pair& pair) {
  while (!pair.pending.empty()) {
    const Pending& front = pair.pending.front();
    if (front.syndrome == Syndrome::none && !front.executed) return;
    if (front.syndrome != Syndrome::none || front.operation.signalled) {
      pair.ready.push_back({pair.ring, front.operation.index, front.syndrome, front.vendor});
    }
    pair.pending.pop_front();
    if (below(6) == 0) return;
  }
}

void AdversarialWire::advance() {
  if (pairs_.empty()) return;
  auto chosen = pairs_.begin();
  std::advance(chosen, static_cast<std::ptrdiff_t>(below(pairs_.size())));
  Pair& pair = chosen->second;
  if (pair.silent) return;
  execute_some(pair);
  if (below(3) == 0) retire(pair);
}

std::size_t AdversarialWire::poll(std::span<rdma::WireCompletion> completions) {
  if (broken) throw SystemError("the device is gone");
  advance();
  std::size_t count = 0;
  for (const rdma::WireCompletion& completion : std::exchange(made_up, {})) completions[count++] = completion;
  for (auto& [number, pair] : pairs_) {
    if (pair.silent || below(3) != 0) continue;
    while (count < completions.size() && !pair.ready.empty()) {
      completions[count++] = pair.ready.front();
      pair.ready.pop_front();
    }
  }
  return count;
}

}  // namespace deep_ep::test
