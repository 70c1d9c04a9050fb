// Commands for the firmware of mlx5 devices travel in mailboxes: big-endian bit fields at fixed places.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace deep_ep::rdma::verbs::devx {

/// Where a field lies: bits are counted from the most significant bit of the first byte, as the programmer's reference
/// manual and the kernel's mlx5_ifc.h do.
struct Field {
  std::uint32_t bit = 0;
  std::uint32_t width = 0;
};

/// A field of a structure that begins at `base` of another one.
constexpr Field within(std::uint32_t base, Field field) { return {base + field.bit, field.width}; }

class Mailbox {
 public:
  explicit Mailbox(std::uint32_t bits);

  /// std::logic_error for a value that does not fit, and for a field that lies outside.
  Mailbox& set(Field field, std::uint64_t value);
  std::uint64_t get(Field field) const;
  /// Whole bytes, for GIDs.
  Mailbox& set_bytes(std::uint32_t bit, std::span<const std::uint8_t> bytes);

  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  std::size_t size() const { return bytes_.size(); }

 private:
  void check(Field field) const;

  std::vector<std::uint8_t> bytes_;
};

}  // namespace deep_ep::rdma::verbs::devx
