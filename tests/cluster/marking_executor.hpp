// Memory whose contents a test knows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tests/cluster/counting_executor.hpp"

namespace deep_ep::test {

/// Gives memory in which every word is 1.
class MarkingExecutor final : public CountingExecutor {
 public:
  static constexpr std::uint32_t kMark = 1;

  using CountingExecutor::CountingExecutor;
  void* allocate_async(std::size_t bytes, StreamHandle stream) override {
    void* memory = CountingExecutor::allocate_async(bytes, stream);
    std::fill_n(static_cast<std::uint32_t*>(memory), bytes / sizeof(std::uint32_t), kMark);
    return memory;
  }
};

}  // namespace deep_ep::test
