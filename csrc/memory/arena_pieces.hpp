// Pieces of the arena for an allocator of the program: see deep_ep/result_tensors.hpp.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "csrc/memory/arena.hpp"
#include "deep_ep/result_tensors.hpp"

namespace deep_ep {

class ArenaPieces final : public HeapPieces {
 public:
  explicit ArenaPieces(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  void* take(std::size_t bytes, StreamHandle stream) override;
  void give_back(void* piece, StreamHandle stream) noexcept override;
  bool contains(const void* memory) const override;
  std::size_t largest_free() const override { return arena_->usage().largest_free; }

 private:
  std::shared_ptr<Arena> arena_;
  mutable std::mutex mutex_;
  std::map<const std::byte*, Arena::Block> taken_;
};

}  // namespace deep_ep
