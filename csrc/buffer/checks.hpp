// Argument checks. Each failure names the argument, says what came and what is allowed.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "csrc/memory/node_membership.hpp"
#include "deep_ep/executor.hpp"
#include "deep_ep/tensor.hpp"
#include "kernels/normal/params.hpp"

namespace deep_ep {

/// Wildcard for a dimension of any size.
constexpr std::int64_t kAnySize = -1;

/// `tensor` lies on `device`, has one of `dtypes`, this shape, and is contiguous.
void check_tensor(const char* name, const ConstTensorView& tensor, const Device& device,
                  std::initializer_list<DType> dtypes, std::initializer_list<std::int64_t> shape);

/// The same for a tensor with any strides.
void check_strided_tensor(const char* name, const ConstTensorView& tensor, const Device& device,
                          std::initializer_list<DType> dtypes, std::initializer_list<std::int64_t> shape);

/// begin <= value <= end.
void check_range(const char* name, std::int64_t value, std::int64_t begin, std::int64_t end);

inline std::int64_t row_bytes(const ConstTensorView& rows) {
  return rows.size(1) * static_cast<std::int64_t>(size_of(rows.dtype));
}
/// A row's bytes can travel: a multiple of 16, not zero, below 2^31. Rows start at multiples of 16, too.
void check_row_bytes(const char* name, const ConstTensorView& tensor);

/// It starts at a multiple of 16.
void check_alignment(const char* name, const ConstTensorView& tensor);

/// That many rows of each rank can be counted in 31 bits, and those of one rank of each node are positions of Progress.
void check_token_count(const char* name, std::int64_t tokens, const NodeMembership& nodes);

/// All ranks own equally many, `most` at most.
void check_experts(const char* name, std::int64_t experts, int num_ranks, int most);

void check_sms(int num_sms);

/// @throws InvalidArgument for cudaStreamPerThread, which is another stream in each thread.
void check_stream(const Device& device, const char* name, StreamHandle stream);

/// Of a tensor that need not be given, then nullptr: its memory, if it is contiguous and of this type and shape.
template <class T, class View>
auto checked_memory(const char* name, const std::optional<View>& tensor, const Device& device, DType dtype,
                    std::initializer_list<std::int64_t> shape) {
  if (tensor) check_tensor(name, *tensor, device, {dtype}, shape);
  return tensor ? tensor->template as<T>() : nullptr;
}

/// Numbers that must be equal on all ranks of a call, in so many bits that travel with it: ranks that disagree would
/// misread each other.
inline std::uint32_t shape_of(std::initializer_list<std::int64_t> numbers, int bits = 32) {
  std::uint32_t shape = 1;
  for (const std::int64_t number : numbers) shape = combine_shapes(shape, static_cast<std::uint32_t>(number));
  return shape >> (32 - bits);
}

}  // namespace deep_ep
