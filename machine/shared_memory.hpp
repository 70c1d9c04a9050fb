// Shared memory of a block, as threads see it and as the copy engine sees it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace deep_ep::host_machine {

/// Filled with poison at the start, followed by a canary (under AddressSanitizer: by a red zone).
/// The engine's view is a second copy, the shadow. Ordinary writes reach it only by publish(); bulk loads write both.
/// So bulk stores of unpublished data send what was there before, or poison.
class SharedMemory {
 public:
  static constexpr unsigned char kPoison = 0xC5;

  explicit SharedMemory(std::size_t bytes);

  std::byte* data() const { return memory_.get(); }
  bool contains(const void* begin, std::size_t bytes) const;
  std::size_t offset(const void* pointer) const;
  /// "shared+128", for messages.
  std::string name(const void* pointer) const;

  /// The range reaches the shadow at the next flush(); many threads may give the same range and pay one copy.
  void publish(const void* begin, std::uint32_t bytes);
  void flush() {
    if (!published_.empty()) copy_published();
  }
  /// Where the engine sees what lies at `pointer`.
  std::byte* shadow_of(const void* pointer);

  /// Did no thread write past the end?
  bool canary_intact() const;

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  struct Range {
    const std::byte* begin;
    std::uint32_t bytes;
    bool operator==(const Range&) const = default;
  };

  void copy_published();

  std::size_t bytes_;
  std::unique_ptr<std::byte[], Free> memory_;
  std::unique_ptr<std::byte[], Free> shadow_;  ///< made at first use: most kernels have no bulk stores
  std::vector<Range> published_;
};

}  // namespace deep_ep::host_machine
