// A framework of a test's program.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "deep_ep/result_tensors.hpp"
#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {

/// A framework whose program has no time to make memory before `may_go`.
class SlowFramework final : public ResultTensors {
 public:
  class Owned final : public Tensor::Storage {
   public:
    explicit Owned(std::size_t bytes) : memory(new std::byte[std::max<std::size_t>(bytes, 1) + kAlignment]) {}
    void record_stream(StreamHandle) override {}
    std::byte* begin() const {
      const auto at = reinterpret_cast<std::uintptr_t>(memory.get());
      return memory.get() + (kAlignment - at % kAlignment);
    }

   private:
    static constexpr std::uintptr_t kAlignment = 128;
    std::unique_ptr<std::byte[]> memory;
  };

  explicit SlowFramework(const std::atomic<bool>& may_go) : may_go_(may_go) {}

  std::vector<Tensor> make(std::span<const TensorView> wanted, const Order&) override {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(patience());
    while (!may_go_ && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    require(may_go_, "the other rank has all its rows before this one has memory for its own");
    std::vector<Tensor> made;
    for (TensorView view : wanted) {
      const auto owner = std::make_shared<Owned>(view.bytes());
      view.data = owner->begin();
      made.emplace_back(view, owner);
    }
    return made;
  }
  std::vector<Tensor> make_in_heap(std::span<const TensorView>, const Order&,
                                   const std::shared_ptr<HeapPieces>&) override {
    return {};
  }

 private:
  const std::atomic<bool>& may_go_;
};

}  // namespace deep_ep::test
