// Tensors as the library sees them: a view describes memory of the caller, a Tensor owns memory of the library.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>

namespace deep_ep {

/// A stream of an executor, opaque: a `cudaStream_t` for the CUDA executor, a stream made by the host executor there.
/// `nullptr` is the executor's default stream (for CUDA: the legacy default stream).
using StreamHandle = void*;

enum class DType : std::uint8_t { boolean, uint8, int32, int64, float32, bfloat16, float16, float8_e4m3, float8_e5m2 };

/// Bytes of one element.
std::size_t size_of(DType dtype);
/// Name as used in messages: "bfloat16", "int64", ...
const char* name_of(DType dtype);

/// Where memory lives. Two devices are equal when kind and index are.
struct Device {
  enum class Kind : std::uint8_t { cpu, cuda };
  Kind kind = Kind::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};
std::string to_string(const Device& device);

/// What a piece of memory holds, and where. Shapes and strides count elements.
struct TensorSpec {
  static constexpr int kMaxDims = 4;

  DType dtype = DType::uint8;
  Device device;
  int dims = 0;
  std::array<std::int64_t, kMaxDims> shape{};
  std::array<std::int64_t, kMaxDims> strides{};

  /// Row-major. Throws InvalidArgument for more than kMaxDims dimensions and for negative sizes.
  static TensorSpec contiguous(DType dtype, std::initializer_list<std::int64_t> shape, Device device = {});

  std::int64_t size(int dim) const { return shape[static_cast<std::size_t>(dim)]; }
  std::int64_t stride(int dim) const { return strides[static_cast<std::size_t>(dim)]; }
  std::int64_t elements() const;
  std::size_t bytes() const { return static_cast<std::size_t>(elements()) * size_of(dtype); }
  bool is_contiguous() const;
  /// "bfloat16[4096, 7168]" and, where not contiguous, the strides.
  std::string describe() const;
};

/// A strided view of memory that somebody else owns.
struct TensorView : TensorSpec {
  void* data = nullptr;

  /// A contiguous (row-major) view.
  static TensorView contiguous(void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device = {}) {
    return {TensorSpec::contiguous(dtype, shape, device), data};
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

/// The same for memory that is only read: what calls take as input. A TensorView converts to it.
struct ConstTensorView : TensorSpec {
  const void* data = nullptr;

  ConstTensorView() = default;
  ConstTensorView(const TensorSpec& spec, const void* data) : TensorSpec(spec), data(data) {}
  ConstTensorView(const TensorView& view) : TensorSpec(view), data(view.data) {}  // NOLINT(google-explicit-constructor)

  /// A contiguous (row-major) view.
  static ConstTensorView contiguous(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                                    Device device = {}) {
    return {TensorSpec::contiguous(dtype, shape, device), data};
  }

  template <class T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
};

/// A tensor whose memory the library provided. Copies share the memory; the last one gives it back,
/// in the order of the streams that used it (see `record_stream`). May outlive the Buffer that made it.
class Tensor {
 public:
  /// Lifetime of the memory behind a tensor. The destructor gives the memory back.
  class Storage {
   public:
    virtual ~Storage() = default;
    /// The memory is also used by work on `stream`: do not reuse it before that work ends.
    virtual void record_stream(StreamHandle stream) = 0;
  };

  Tensor() = default;
  Tensor(TensorView view, std::shared_ptr<Storage> storage) : view_(view), storage_(std::move(storage)) {}
  /// A tensor over memory that somebody else owns and keeps alive; record_stream does nothing.
  static Tensor borrow(const TensorView& view);

  const TensorView& view() const { return view_; }
  void* data() const { return view_.data; }
  std::int64_t size(int dim) const { return view_.size(dim); }
  bool defined() const { return storage_ != nullptr; }
  void record_stream(StreamHandle stream) const {
    if (storage_) storage_->record_stream(stream);
  }
  const std::shared_ptr<Storage>& storage() const { return storage_; }

  template <class T>
  T* as() const {
    return view_.as<T>();
  }

 private:
  TensorView view_;
  std::shared_ptr<Storage> storage_;
};

}  // namespace deep_ep
