// Shared memory of a block, as threads see it and as the copy engine sees it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace deep_ep::host_machine {

/// Filled with poison at the start, followed by a canary (under AddressSanitizer: by a red zone).
/// The engine's view is a second copy, the shadow. Bulk loads write both, ordinary writes never reach it: a GPU needs a
/// proxy fence for that, which no kernel makes. So bulk stores of what threads wrote send what was there before, or
/// poison.
class SharedMemory {
 public:
  explicit SharedMemory(std::size_t bytes);

  std::byte* data() const { return memory_.get(); }
  bool contains(const void* begin, std::size_t bytes) const {
    return offset(begin) <= bytes_ && bytes <= bytes_ - offset(begin);
  }
  /// "shared+128", for messages.
  std::string name(const void* pointer) const { return "shared+" + std::to_string(offset(pointer)); }
  /// Where the engine sees what lies at `pointer`.
  std::byte* shadow_of(const void* pointer);
  /// Did no thread write past the end?
  bool canary_intact() const;

 private:
  /// More than any size for what lies before the memory.
  std::size_t offset(const void* pointer) const {
    return reinterpret_cast<std::uintptr_t>(pointer) - reinterpret_cast<std::uintptr_t>(data());
  }

  std::size_t bytes_;
  std::shared_ptr<std::byte[]> memory_;
  std::vector<std::byte> shadow_;  ///< made at first use: most kernels have no bulk stores
};

}  // namespace deep_ep::host_machine
