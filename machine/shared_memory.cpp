#include "machine/shared_memory.hpp"

#include <algorithm>
#include <cstdlib>

#include "csrc/support/format.hpp"
#include "kernels/primitives/target.hpp"

namespace deep_ep::host_machine {

namespace {

constexpr std::size_t kAlignment = 1024;
constexpr std::byte kPoison{0xC5}, kCanary{0xA7};
// AddressSanitizer's own red zone begins where the allocation ends: leave no canary between.
constexpr std::size_t kCanaryBytes = DEEP_EP_ASAN ? 0 : 256;

}  // namespace

SharedMemory::SharedMemory(std::size_t bytes) : bytes_(bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlignment, std::max<std::size_t>(bytes + kCanaryBytes, 1)) != 0) {
    fail<OutOfMemory>("no memory for {} of shared memory of a kernel block on the host", format_bytes(bytes));
  }
  memory_.reset(static_cast<std::byte*>(memory), &std::free);
  std::fill_n(data(), bytes, kPoison);
  std::fill_n(data() + bytes, kCanaryBytes, kCanary);
}

std::byte* SharedMemory::shadow_of(const void* pointer) {
  if (shadow_.empty()) shadow_.resize(bytes_, kPoison);
  return shadow_.data() + offset(pointer);
}

bool SharedMemory::canary_intact() const {
  const std::byte* canary = data() + bytes_;
  return std::all_of(canary, canary + kCanaryBytes, [](std::byte b) { return b == kCanary; });
}

}  // namespace deep_ep::host_machine
