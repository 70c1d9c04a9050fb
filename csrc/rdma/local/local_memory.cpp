#include "csrc/rdma/local/local_memory.hpp"

#include <cstring>

#include "csrc/executor/own_stream.hpp"

namespace deep_ep::rdma {
namespace {

class HostMemory final : public LocalMemory {
 public:
  void copy(void* destination, const void* source, std::size_t bytes) override {
    std::memcpy(destination, source, bytes);
  }
  void fetch_add(void* word, std::uint64_t add, void* before) override {
    const std::uint64_t old = __atomic_fetch_add(static_cast<std::uint64_t*>(word), add, __ATOMIC_ACQ_REL);
    std::memcpy(before, &old, sizeof old);
  }
  void finish() override {}
};

class ExecutorMemory final : public LocalMemory {
 public:
  explicit ExecutorMemory(std::shared_ptr<Executor> executor)
      : executor_(std::move(executor)),
        stream_(*executor_),
        bounce_(static_cast<std::uint64_t*>(executor_->allocate_pinned(2 * sizeof(std::uint64_t)))) {}
  ~ExecutorMemory() override { executor_->free_pinned(bounce_); }
  ExecutorMemory(const ExecutorMemory&) = delete;
  ExecutorMemory& operator=(const ExecutorMemory&) = delete;

  void copy(void* destination, const void* source, std::size_t bytes) override {
    executor_->copy(destination, source, bytes, stream_.get());
    busy_ = true;
  }
  void fetch_add(void* word, std::uint64_t add, void* before) override {
    // Earlier copies are complete before the sum is written: there is one stream, and this waits for it.
    executor_->copy(bounce_, word, sizeof add, stream_.get());
    executor_->synchronize(stream_.get());
    bounce_[1] = bounce_[0] + add;
    executor_->copy(before, bounce_, sizeof add, stream_.get());
    executor_->copy(word, bounce_ + 1, sizeof add, stream_.get());
    executor_->synchronize(stream_.get());
    busy_ = false;
  }
  void finish() override {
    if (busy_) executor_->synchronize(stream_.get());
    busy_ = false;
  }

 private:
  std::shared_ptr<Executor> executor_;
  OwnStream stream_;
  std::uint64_t* bounce_;  ///< the value that was read, and the one to write
  bool busy_ = false;
};

}  // namespace

std::unique_ptr<LocalMemory> make_host_memory() { return std::make_unique<HostMemory>(); }

std::unique_ptr<LocalMemory> make_executor_memory(std::shared_ptr<Executor> executor) {
  return std::make_unique<ExecutorMemory>(std::move(executor));
}

}  // namespace deep_ep::rdma
