// Tensors as the library sees them: a view describes memory of the caller, a Tensor owns memory of the library.
#pragma once
// SPDX-License-Identifier: MIT

#include "deep_ep/standard.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace deep_ep {

/// A stream of an executor, opaque: a `cudaStream_t` for the CUDA executor, a stream made by the host executor there.
/// `nullptr` is the executor's default stream (for CUDA: the legacy default stream).
using StreamHandle = void*;

/// The type of an element. boolean has one byte, 0 or 1.
enum class DType : std::uint8_t { boolean, uint8, int32, int64, float32, bfloat16, float16, float8_e4m3, float8_e5m2 };

/// Bytes of one element.
std::size_t size_of(DType dtype);
/// Name as used in messages: "bfloat16", "int64", ...
const char* name_of(DType dtype);

/// The device of memory. Devices are equal if kind and index are.
struct Device {
  /// The kind of processor.
  enum class Kind : std::uint8_t { cpu, cuda };
  Kind kind = Kind::cpu;  ///< CPU or GPU
  int index = 0;          ///< CUDA's ordinal of the GPU, 0 on the CPU
  /// Compares kind and index.
  bool operator==(const Device&) const = default;
};
/// `device` as "cpu" or "cuda:1".
std::string to_string(const Device& device);

/// A tensor's type and place. Shapes and strides count elements.
struct TensorSpec {
  static constexpr int kMaxDims = 4;  ///< the most dimensions

  DType dtype = DType::uint8;                    ///< of an element
  Device device = {};                            ///< of the memory
  int dims = 0;                                  ///< dimensions, 0 to kMaxDims
  std::array<std::int64_t, kMaxDims> shape{};    ///< elements of each; those after `dims` mean nothing
  std::array<std::int64_t, kMaxDims> strides{};  ///< elements from one to the next of each

  /// Row-major, of `shape` elements on `device`. Throws InvalidArgument for more than kMaxDims dimensions and for
  /// negative sizes.
  static TensorSpec contiguous(DType dtype, std::initializer_list<std::int64_t> shape, Device device = {});

  /// The size of dimension `dim`, 0 to dims - 1.
  std::int64_t size(int dim) const { return shape[static_cast<std::size_t>(dim)]; }
  /// The stride of dimension `dim`, 0 to dims - 1.
  std::int64_t stride(int dim) const { return strides[static_cast<std::size_t>(dim)]; }
  /// The number of elements.
  std::int64_t elements() const;
  /// The bytes of all elements without gaps.
  std::size_t bytes() const { return static_cast<std::size_t>(elements()) * size_of(dtype); }
  /// Row-major without gaps; dimensions of one element may have any stride, and tensors without elements any strides.
  bool is_contiguous() const;
  /// "bfloat16[4096, 7168]"; if not contiguous, with the strides.
  std::string describe() const;
};

/// A strided view of memory that the view does not own.
template <class Memory>
struct BasicTensorView : TensorSpec {
  Memory* data = nullptr;  ///< the first element

  /// No memory: data is nullptr.
  BasicTensorView() = default;
  /// @param spec of the memory. @param first the first element.
  BasicTensorView(const TensorSpec& spec, Memory* first) : TensorSpec(spec), data(first) {}
  /// The same memory as of `view`, only read.
  template <class Other>
  requires std::is_same_v<Memory, const Other> BasicTensorView(
      const BasicTensorView<Other>& view)  // NOLINT(google-explicit-constructor)
      : TensorSpec(view), data(view.data) {}

  /// A contiguous (row-major) view.
  static BasicTensorView contiguous(Memory* data, DType dtype, std::initializer_list<std::int64_t> shape,
                                    Device device = {}) {
    return {TensorSpec::contiguous(dtype, shape, device), data};
  }

  /// `data` as elements of type T. The dtype is not checked.
  template <class T>
  auto* as() const {
    return static_cast<std::conditional_t<std::is_const_v<Memory>, const T, T>*>(data);
  }
};
/// Memory that is read and written.
using TensorView = BasicTensorView<void>;
/// Memory that is only read. A TensorView converts to it.
using ConstTensorView = BasicTensorView<const void>;

/// A tensor whose memory the library provided. Copies share the memory; the last one frees it in the order of the
/// streams that used it (see `record_stream`). It may outlive its Buffer.
class Tensor {
 public:
  /// The lifetime of a tensor's memory. The destructor frees it.
  class Storage {
   public:
    virtual ~Storage() = default;
    /// The memory is also used by work on `stream`: do not reuse it before that work ends.
    virtual void record_stream(StreamHandle stream) = 0;
    /// Whether the end of the tensor on `stream` says nothing new of its use: the stream is known, or records a graph
    /// that the memory is not of.
    virtual bool knows_stream(StreamHandle /*stream*/) const { return false; }
  };

  /// Not defined: without memory.
  Tensor() = default;
  /// @param view of the memory. @param storage keeps the memory.
  Tensor(TensorView view, std::shared_ptr<Storage> storage) : view_(view), storage_(std::move(storage)) {}
  /// A tensor over memory that the caller owns and keeps alive; record_stream does nothing.
  static Tensor borrow(const TensorView& view);

  const TensorView& view() const { return view_; }  ///< valid as long as a copy of the tensor lives
  void* data() const { return view_.data; }         ///< the first element
  /// The size of dimension `dim`, 0 to dims - 1.
  std::int64_t size(int dim) const { return view_.size(dim); }
  bool defined() const { return storage_ != nullptr; }  ///< whether there is memory, also for 0 elements
  /// The memory is also used by work on `stream`: the last copy frees it after that work, too.
  void record_stream(StreamHandle stream) const {
    if (storage_) storage_->record_stream(stream);
  }
  const std::shared_ptr<Storage>& storage() const { return storage_; }  ///< keeps the memory; nullptr: not defined

  /// data() as elements of type T. The dtype is not checked.
  template <class T>
  T* as() const {
    return view_.as<T>();
  }

 private:
  TensorView view_;
  std::shared_ptr<Storage> storage_;
};

}  // namespace deep_ep
