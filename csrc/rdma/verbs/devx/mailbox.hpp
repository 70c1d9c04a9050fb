// Commands for the firmware of an mlx5 device, and its answers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "csrc/rdma/verbs/devx/layout.hpp"

namespace deep_ep::rdma::verbs::devx {

/// Big-endian bit fields at fixed places.
class Mailbox {
 public:
  explicit Mailbox(std::uint32_t bits) : bytes_(bits / 8) {}

  /// std::logic_error for a value that does not fit, or a field that lies outside.
  Mailbox& set(Field field, std::uint64_t value);
  std::uint64_t get(Field field) const;
  /// Whole bytes, for GIDs and hardware addresses.
  Mailbox& set_bytes(std::uint32_t bit, std::span<const std::uint8_t> bytes);

  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  std::size_t size() const { return bytes_.size(); }

 private:
  std::vector<std::uint8_t> bytes_;
};

/// A mailbox that begins with its command.
struct Request : Mailbox {
  explicit Request(const Command& what) : Mailbox(what.bits), command(what) {
    set(layout::command::opcode, what.opcode);
  }
  const Command& command;
};

}  // namespace deep_ep::rdma::verbs::devx
