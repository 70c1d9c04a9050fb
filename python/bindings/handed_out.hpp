// Tensors that are in the hands of the framework, found by the address of their memory. The framework frees them
// through DLPack; all else that programs do with memory (record_stream, resize_) it cannot pass on, so Python passes it
// here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "deep_ep/tensor.hpp"
#include "python/bindings/dlpack.hpp"

namespace deep_ep::bindings {

/// nullptr: the framework cannot be asked without the GIL.
using CurrentStream = int (*)(dlpack::DeviceType, std::int32_t, void**);

/// What programs may do with the memory of a tensor before its end. What calls need later is kept: a handle's tensors,
/// and the buffer's own memory.
enum class Early { freed, kept };

/// One of them. Its context is itself; `give_back` ends it.
struct HandedOut {
  HandedOut(const Tensor& tensor, CurrentStream current_stream, Early early);
  HandedOut(const HandedOut&) = delete;
  HandedOut& operator=(const HandedOut&) = delete;

  void fill(dlpack::TensorInfo& info, const dlpack::DataType& dtype);
  static void give_back(HandedOut* handed_out) noexcept;

  dlpack::ManagedTensorVersioned versioned{};
  dlpack::ManagedTensor plain{};
  Tensor tensor;  ///< empty: it was freed before its end
  std::array<std::int64_t, TensorView::kMaxDims> shape;
  std::array<std::int64_t, TensorView::kMaxDims> strides;
  CurrentStream current_stream;

 private:
  friend class HandedOutTable;
  /// Freed ones no longer do: their memory may be another one's.
  bool lies_at(const void* address, std::size_t bytes) const {
    return address_ == address && bytes_ == bytes && tensor.defined();
  }

  void* address_;
  std::size_t bytes_;  ///< as the framework counts them
  Early early_;
  HandedOut* next_ = nullptr;
};

/// Thread-safe: frameworks free tensors in any thread.
class HandedOutTable {
 public:
  static HandedOutTable& instance();

  void add(HandedOut& handed_out);
  void remove(HandedOut& handed_out) noexcept;

  /// `stream` uses the memory that begins there, too. False if none of ours does.
  bool record_stream(const void* address, StreamHandle stream);
  /// Does one of ours lie there?
  bool contains(const void* address, std::size_t bytes);
  /// This memory goes back now, behind what its users have enqueued, but for what is kept; the framework still has the
  /// tensor, which nobody may read. False if there is none.
  bool free(const void* address, std::size_t bytes);

 private:
  static constexpr std::size_t kBuckets = 4096;
  HandedOut*& bucket(const void* address) {
    return buckets_[(reinterpret_cast<std::uintptr_t>(address) >> 8) % kBuckets];
  }

  std::mutex mutex_;
  std::array<HandedOut*, kBuckets> buckets_{};
};

}  // namespace deep_ep::bindings
