// 8-byte words in memory that the host, kernels and NICs reach.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "deep_ep/executor.hpp"

namespace deep_ep::rdma {

/// Zero-filled pinned memory of an executor.
class PinnedWords {
 public:
  PinnedWords(std::shared_ptr<Executor> executor, std::size_t count)
      : executor_(std::move(executor)),
        count_(count),
        words_(static_cast<std::uint64_t*>(
            executor_->allocate_pinned(std::max<std::size_t>(1, count) * sizeof(std::uint64_t)))) {}
  ~PinnedWords() { executor_->free_pinned(words_); }
  PinnedWords(const PinnedWords&) = delete;
  PinnedWords& operator=(const PinnedWords&) = delete;

  std::uint64_t* data() const { return words_; }
  std::size_t count() const { return count_; }
  std::size_t bytes() const { return count_ * sizeof(std::uint64_t); }

 private:
  std::shared_ptr<Executor> executor_;
  std::size_t count_;
  std::uint64_t* words_;
};

}  // namespace deep_ep::rdma
