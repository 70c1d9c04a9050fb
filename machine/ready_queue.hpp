// Fibers of a block that can run. First in, first out; a seeded schedule draws.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "machine/fiber.hpp"
#include "machine/random.hpp"

namespace deep_ep::host_machine {

class ReadyQueue {
 public:
  /// A fiber is in the queue at most once, so `threads` places suffice.
  explicit ReadyQueue(int threads) {
    std::size_t places = 1;
    while (places < static_cast<std::size_t>(threads)) places *= 2;
    ring_.resize(places);
  }

  std::size_t size() const { return tail_ - head_; }
  bool empty() const { return tail_ == head_; }

  void push(Fiber& fiber) { at(tail_++) = &fiber; }
  Fiber& pop(Random& random) {
    if (random.enabled()) std::swap(at(head_), at(head_ + random.below(static_cast<std::uint32_t>(size()))));
    return *at(head_++);
  }

 private:
  Fiber*& at(std::size_t position) { return ring_[position & (ring_.size() - 1)]; }

  std::vector<Fiber*> ring_;
  std::size_t head_ = 0;
  std::size_t tail_ = 0;
};

}  // namespace deep_ep::host_machine
