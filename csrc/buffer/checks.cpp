#include "csrc/buffer/checks.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <ranges>

#include "csrc/support/format.hpp"

namespace deep_ep {
void check_strided_tensor(const char* name, const ConstTensorView& tensor, const Device& device,
                          std::initializer_list<DType> dtypes, std::initializer_list<std::int64_t> shape) {
  if (dtypes.size() != 0 && std::ranges::find(dtypes, tensor.dtype) == dtypes.end()) {
    fail<InvalidArgument>("{} has dtype {}, allowed: {}", name, name_of(tensor.dtype),
                          fmt::join(dtypes | std::views::transform(name_of), " or "));
  }
  const auto fits = [](std::int64_t wanted, std::int64_t size) {
    return size >= 0 && (wanted == kAnySize || wanted == size);
  };
  if (tensor.dims != static_cast<int>(shape.size()) ||
      !std::equal(shape.begin(), shape.end(), tensor.shape.begin(), fits)) {
    const auto text = [](std::int64_t size) { return size == kAnySize ? "any" : std::to_string(size); };
    fail<InvalidArgument>("{} is {}, its shape must be [{}]", name, tensor.describe(),
                          fmt::join(shape | std::views::transform(text), ", "));
  }
  if (tensor.device != device) {
    fail<InvalidArgument>("{} lies on {}, the buffer on {}", name, to_string(tensor.device), to_string(device));
  }
  if (tensor.data == nullptr && tensor.elements() != 0) {
    fail<InvalidArgument>("{} is {} but its data pointer is null", name, tensor.describe());
  }
}

void check_tensor(const char* name, const ConstTensorView& tensor, const Device& device,
                  std::initializer_list<DType> dtypes, std::initializer_list<std::int64_t> shape) {
  check_strided_tensor(name, tensor, device, dtypes, shape);
  if (!tensor.is_contiguous()) {
    fail<InvalidArgument>("{} is {}, it must be contiguous (row-major)", name, tensor.describe());
  }
}

void check_range(const char* name, std::int64_t value, std::int64_t begin, std::int64_t end) {
  if (value < begin || value > end) {
    fail<InvalidArgument>("{} is {}, allowed: {} to {}", name, value, begin, end);
  }
}

void check_row_bytes(const char* name, const ConstTensorView& tensor) {
  const std::int64_t bytes = row_bytes(tensor);
  if (bytes <= 0 || bytes % 16 != 0 || bytes >= std::int64_t{1} << 31) {
    fail<InvalidArgument>("{} is {}: a row has {} bytes, allowed: a multiple of 16 below 2^31", name, tensor.describe(),
                          bytes);
  }
  check_alignment(name, tensor);
}

void check_alignment(const char* name, const ConstTensorView& tensor) {
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % 16 != 0) {
    fail<InvalidArgument>("{} starts at an address that is not a multiple of 16", name);
  }
}

void check_token_count(const char* name, std::int64_t tokens, const NodeMembership& nodes) {
  const auto ranks = static_cast<std::int64_t>(nodes.node.size());
  check_range(name, tokens, 0,
              std::min(INT32_MAX / (ranks + nodes.num_nodes),  // see LayoutParams::columns
                       std::int64_t{Progress::kMostPosition / static_cast<unsigned>(nodes.num_nodes)}));
}

void check_experts(const char* name, std::int64_t experts, int num_ranks, int most) {
  if (experts >= 1 && experts % num_ranks == 0 && experts / num_ranks <= most) return;
  fail<InvalidArgument>("{} is {}, allowed: a multiple of the {} ranks, at most {} a rank", name, experts, num_ranks,
                        most);
}

void check_stream(const Device& device, const char* name, StreamHandle stream) {
  constexpr std::uintptr_t kPerThread = 2;  // cudaStreamPerThread
  if (device.kind != Device::Kind::cuda || reinterpret_cast<std::uintptr_t>(stream) != kPerThread) return;
  fail<InvalidArgument>(
      "{} must be a stream that is the same in all threads, got cudaStreamPerThread: make one with cudaStreamCreate",
      name);
}

void check_sms(int num_sms) { check_range("num_sms", num_sms, 0, 4096); }

}  // namespace deep_ep
