// Tests of what works on tensors of an executor: their memory, and their bfloat16 numbers.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep::test {

inline std::uint16_t bf16_of(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float float_of(std::uint16_t value) { return std::bit_cast<float>(std::uint32_t{value} << 16); }

/// Memory of an executor that begins with `values`.
template <class T>
class OnDevice {
 public:
  OnDevice(Executor& executor, const std::vector<T>& values)
      : executor_(executor), count_(values.size()), memory_(executor.allocate(bytes())) {
    executor.copy(memory_, values.data(), values.size() * sizeof(T), nullptr);
    executor.synchronize(nullptr);
  }
  ~OnDevice() { executor_.free(memory_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  TensorView view(DType dtype, std::initializer_list<std::int64_t> shape) const {
    return TensorView::contiguous(memory_, dtype, shape, executor_.device());
  }
  T* data() const { return static_cast<T*>(memory_); }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    executor_.copy(values.data(), memory_, count_ * sizeof(T), nullptr);
    executor_.synchronize(nullptr);
    return values;
  }

 private:
  std::size_t bytes() const { return std::max<std::size_t>(count_ * sizeof(T), 16); }
  Executor& executor_;
  std::size_t count_;
  void* memory_;
};

/// The text of the exception that the call throws, or nothing.
template <class Call>
std::string refusal(Call call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

}  // namespace deep_ep::test
