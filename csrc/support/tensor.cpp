#include "deep_ep/tensor.hpp"

#include <algorithm>
#include <array>
#include <optional>

#include "csrc/support/format.hpp"

namespace deep_ep {
namespace {

struct Type {
  const char* name;
  std::size_t size;
};
/// Of DType, in its order.
constexpr std::array kTypes = {Type{"bool", 1},    Type{"uint8", 1},       Type{"int32", 4},
                               Type{"int64", 8},   Type{"float32", 4},     Type{"bfloat16", 2},
                               Type{"float16", 2}, Type{"float8_e4m3", 1}, Type{"float8_e5m2", 1}};
static_assert(kTypes.size() == static_cast<std::size_t>(DType::float8_e5m2) + 1);

/// Sums and multiples of such numbers do not wrap.
constexpr std::int64_t kMostElements = std::int64_t{1} << 56;

bool dims_exist(const TensorSpec& spec) { return spec.dims >= 0 && spec.dims <= TensorSpec::kMaxDims; }

/// Nothing where a size is negative, or where they are too many elements, a size of 0 being counted as 1.
std::optional<std::int64_t> extent(const TensorSpec& spec) {
  std::int64_t product = 1;
  for (int dim = 0; dim < spec.dims; ++dim) {
    const std::int64_t size = spec.size(dim);
    const bool wraps = __builtin_mul_overflow(product, std::max<std::int64_t>(size, 1), &product);
    if (size < 0 || wraps || product > kMostElements) return std::nullopt;
  }
  return product;
}

std::string list(const std::array<std::int64_t, TensorSpec::kMaxDims>& values, int dims) {
  return fmt::format("[{}]", fmt::join(values.begin(), values.begin() + dims, ", "));
}

}  // namespace

std::size_t size_of(DType dtype) {
  const auto number = static_cast<std::size_t>(dtype);
  if (number >= kTypes.size()) fail<InvalidArgument>("dtype number {} does not exist", number);
  return kTypes[number].size;
}

const char* name_of(DType dtype) {
  const auto number = static_cast<std::size_t>(dtype);
  return number < kTypes.size() ? kTypes[number].name : "unknown dtype";
}

std::string to_string(const Device& device) {
  return device.kind == Device::Kind::cpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

TensorSpec TensorSpec::contiguous(DType dtype, std::initializer_list<std::int64_t> shape, Device device) {
  if (shape.size() > kMaxDims) {
    fail<InvalidArgument>("shape has {} dimensions, allowed: at most {}", shape.size(), kMaxDims);
  }
  TensorSpec spec;
  spec.dtype = dtype;
  spec.device = device;
  for (const std::int64_t size : shape) {
    if (size < 0) fail<InvalidArgument>("shape has a size of {} in dimension {}, allowed: 0 or more", size, spec.dims);
    spec.shape[static_cast<std::size_t>(spec.dims++)] = size;
  }
  if (!extent(spec)) {
    fail<InvalidArgument>("shape is {}, allowed: at most {} elements, a size of 0 being counted as 1",
                          list(spec.shape, spec.dims), kMostElements);
  }
  std::int64_t stride = 1;
  for (int dim = spec.dims - 1; dim >= 0; --dim) {
    spec.strides[static_cast<std::size_t>(dim)] = stride;
    // A dimension of size 0 must not make the outer strides 0: they still say what a row would be.
    stride *= spec.size(dim) > 0 ? spec.size(dim) : 1;
  }
  return spec;
}

std::int64_t TensorSpec::elements() const {
  if (!dims_exist(*this) || !extent(*this)) fail<InvalidArgument>("{} cannot be the shape of a tensor", describe());
  std::int64_t count = 1;
  for (int dim = 0; dim < dims; ++dim) count *= size(dim);
  return count;
}

bool TensorSpec::is_contiguous() const {
  if (!dims_exist(*this) || !extent(*this)) return false;
  if (elements() == 0) return true;
  std::int64_t expected = 1;
  for (int dim = dims - 1; dim >= 0; --dim) {
    // The stride of a dimension of size 1 is never used, whatever a framework wrote there.
    if (size(dim) == 1) continue;
    if (stride(dim) != expected) return false;
    expected *= size(dim);
  }
  return true;
}

std::string TensorSpec::describe() const {
  if (!dims_exist(*this)) return fmt::format("{} of {} dimensions", name_of(dtype), dims);
  std::string text = name_of(dtype) + list(shape, dims);
  if (extent(*this) && !is_contiguous()) text += " with strides " + list(strides, dims);
  return text;
}

Tensor Tensor::borrow(const TensorView& view) {
  class Borrowed final : public Storage {
    void record_stream(StreamHandle) override {}
  };
  static const auto storage = std::make_shared<Borrowed>();
  return {view, storage};
}

}  // namespace deep_ep
