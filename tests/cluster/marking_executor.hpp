// Memory whose contents a test knows.
#pragma once

#include <cstdint>

#include "tests/cluster/counting_executor.hpp"

namespace deep_ep::test {

/// Gives memory in which every word is kMark.
class MarkingExecutor final : public CountingExecutor {
 public:
  static constexpr std::uint32_t kMark = 0x01010101;

  using CountingExecutor::CountingExecutor;
  void* allocate(std::size_t bytes) override {
    void* memory = CountingExecutor::allocate(bytes);
    CountingExecutor::fill(memory, 1, bytes, nullptr);
    CountingExecutor::synchronize(nullptr);
    return memory;
  }
};

}  // namespace deep_ep::test
