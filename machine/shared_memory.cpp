#include "machine/shared_memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"
#include "kernels/primitives/target.hpp"

namespace deep_ep::host_machine {

namespace {

constexpr std::size_t kAlignment = 1024;
constexpr int kCanary = 0xA7;
// AddressSanitizer's own red zone begins where the allocation ends: leave no canary between.
constexpr std::size_t kCanaryBytes = DEEP_EP_ASAN ? 0 : 256;

std::shared_ptr<std::byte[]> allocate(std::size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlignment, bytes == 0 ? 1 : bytes) != 0) {
    fail<OutOfMemory>("no memory for {} of shared memory of a kernel block on the host", format_bytes(bytes));
  }
  return {static_cast<std::byte*>(memory), &std::free};
}

}  // namespace

SharedMemory::SharedMemory(std::size_t bytes) : bytes_(bytes), memory_(allocate(bytes + kCanaryBytes)) {
  std::memset(memory_.get(), kPoison, bytes);
  std::memset(memory_.get() + bytes, kCanary, kCanaryBytes);
}

bool SharedMemory::contains(const void* begin, std::size_t bytes) const {
  const auto* p = static_cast<const std::byte*>(begin);
  return p >= data() && p <= data() + bytes_ && bytes <= static_cast<std::size_t>(data() + bytes_ - p);
}

std::size_t SharedMemory::offset(const void* pointer) const {
  return static_cast<std::size_t>(static_cast<const std::byte*>(pointer) - data());
}

std::string SharedMemory::name(const void* pointer) const { return fmt::format("shared+{}", offset(pointer)); }

std::byte* SharedMemory::shadow_of(const void* pointer) {
  if (shadow_ == nullptr) {
    shadow_ = allocate(bytes_);
    std::memset(shadow_.get(), kPoison, bytes_);
  }
  return shadow_.get() + offset(pointer);
}

bool SharedMemory::canary_intact() const {
  const std::byte* canary = memory_.get() + bytes_;
  return std::all_of(canary, canary + kCanaryBytes, [](std::byte b) { return b == std::byte{kCanary}; });
}

}  // namespace deep_ep::host_machine
