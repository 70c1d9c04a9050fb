#include "csrc/rdma/local/local_wire.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

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

LocalWire::LocalWire(std::unique_ptr<LocalMemory> memory) : memory_(std::move(memory)) {}

void LocalWire::add_memory(std::uint32_t key, void* base, std::size_t bytes) {
  regions_[key] = {static_cast<std::byte*>(base), bytes};
}

void LocalWire::add_queue_pair(std::uint32_t number) { failed_[number] = false; }

std::byte* LocalWire::find(const device::rdma::KeyedAddress& place, std::uint64_t bytes) const {
  const auto region = regions_.find(place.key);
  if (region == regions_.end()) return nullptr;
  const bool inside = place.address <= region->second.bytes && bytes <= region->second.bytes - place.address;
  return inside ? region->second.base + place.address : nullptr;
}

Syndrome LocalWire::execute(const Operation& operation) {
  const bool adds = operation.opcode == device::rdma::kOpcodeFetchAdd;
  // A write of no bytes is not checked, as on devices.
  if (operation.length == 0 && !adds) return Syndrome::none;
  std::byte* local = find(operation.local, operation.length);
  if (local == nullptr) return Syndrome::local_protection;
  if (adds && operation.remote.address % sizeof operation.add != 0) return Syndrome::remote_invalid_request;
  std::byte* remote = find(operation.remote, operation.length);
  if (remote == nullptr) return Syndrome::remote_access;
  if (adds) {
    memory_->fetch_add(remote, operation.add, local);
  } else {
    memory_->copy(remote, local, operation.length);
  }
  return Syndrome::none;
}

std::size_t LocalWire::post(std::span<const Operation> operations) {
  for (const Operation& operation : operations) {
    bool& failed = failed_.at(operation.queue_pair);
    if (failed) continue;
    const Syndrome syndrome = execute(operation);
    failed = syndrome != Syndrome::none;
    if (failed || operation.signalled) {
      completions_.push_back({operation.queue_pair, operation.index, syndrome, 0});
    }
  }
  return operations.size();
}

std::size_t LocalWire::poll(std::span<WireCompletion> completions) {
  const std::size_t count = std::min(completions.size(), completions_.size());
  if (count == 0) return 0;
  memory_->finish();
  std::copy_n(completions_.begin(), count, completions.begin());
  completions_.erase(completions_.begin(), completions_.begin() + static_cast<std::ptrdiff_t>(count));
  return count;
}

}  // namespace deep_ep::rdma
