#include "csrc/rdma/local/local_wire.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/memory/executor_memory.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::rdma {

LocalWire::LocalWire(std::shared_ptr<Executor> executor) : executor_(std::move(executor)) {
  if (executor_ == nullptr) return;
  stream_.emplace(*executor_);
  bounce_ = pinned_memory<std::uint64_t>(executor_, 2 * sizeof(std::uint64_t));
}

void LocalWire::add_memory(std::uint32_t key, void* base, std::size_t bytes) {
  regions_[key] = {static_cast<std::byte*>(base), bytes};
}

std::byte* LocalWire::find(const device::rdma::KeyedAddress& place, std::uint64_t bytes) const {
  const auto region = regions_.find(place.key);
  if (region == regions_.end()) return nullptr;
  const bool inside = place.address <= region->second.bytes && bytes <= region->second.bytes - place.address;
  return inside ? region->second.base + place.address : nullptr;
}

void LocalWire::copy(void* destination, const void* source, std::size_t bytes) {
  if (executor_ == nullptr) return void(std::memcpy(destination, source, bytes));
  executor_->copy(destination, source, bytes, stream_->get());
  copying_ = true;
}

void LocalWire::fetch_add(void* word, std::uint64_t add, void* before) {
  if (executor_ == nullptr) {
    const std::uint64_t old = __atomic_fetch_add(static_cast<std::uint64_t*>(word), add, __ATOMIC_ACQ_REL);
    return void(std::memcpy(before, &old, sizeof old));
  }
  // Earlier copies are complete before the sum is written: there is one stream, and this waits for it.
  std::uint64_t* const values = bounce_.get();
  executor_->copy(values, word, sizeof add, stream_->get());
  executor_->synchronize(stream_->get());
  values[1] = values[0] + add;
  executor_->copy(before, values, sizeof add, stream_->get());
  executor_->copy(word, values + 1, sizeof add, stream_->get());
  executor_->synchronize(stream_->get());
  copying_ = false;
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
    fetch_add(remote, operation.add, local);
  } else {
    copy(remote, local, operation.length);
  }
  return Syndrome::none;
}

std::size_t LocalWire::post(std::size_t ring, std::span<const Operation> operations) {
  bool& failed = failed_[ring];
  for (const Operation& operation : operations) {
    if (failed) continue;
    const Syndrome syndrome = execute(operation);
    failed = syndrome != Syndrome::none;
    if (failed || operation.signalled) {
      completions_.push_back({ring, operation.index, syndrome, 0});
    }
  }
  return operations.size();
}

std::size_t LocalWire::poll(std::span<WireCompletion> completions) {
  const std::size_t count = std::min(completions.size(), completions_.size());
  if (count == 0) return 0;
  if (std::exchange(copying_, false)) executor_->synchronize(stream_->get());
  std::copy_n(completions_.begin(), count, completions.begin());
  completions_.erase(completions_.begin(), completions_.begin() + static_cast<std::ptrdiff_t>(count));
  return count;
}

}  // namespace deep_ep::rdma
