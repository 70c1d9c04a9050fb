#include "csrc/rdma/verbs/devx/mailbox.hpp"

#include <stdexcept>

#include "csrc/support/format.hpp"

namespace deep_ep::rdma::verbs::devx {

Mailbox& Mailbox::set(Field field, std::uint64_t value) {
  if (field.width < 64 && value >> field.width != 0) {
    throw std::logic_error(fmt::format("{:#x} does not fit into {} bits at bit {:#x}", value, field.width, field.bit));
  }
  for (std::uint32_t i = 0; i < field.width; ++i) {
    const std::uint32_t bit = field.bit + field.width - 1 - i;
    const auto mask = static_cast<std::uint8_t>(0x80U >> bit % 8);
    std::uint8_t& byte = bytes_.at(bit / 8);
    byte = static_cast<std::uint8_t>((value >> i & 1) != 0 ? byte | mask : byte & ~mask);
  }
  return *this;
}

std::uint64_t Mailbox::get(Field field) const {
  std::uint64_t value = 0;
  for (std::uint32_t bit = field.bit; bit < field.bit + field.width; ++bit) {
    value = value << 1 | (bytes_.at(bit / 8) >> (7 - bit % 8) & 1);
  }
  return value;
}

Mailbox& Mailbox::set_bytes(std::uint32_t bit, std::span<const std::uint8_t> bytes) {
  for (const std::uint8_t byte : bytes) {
    set({bit, 8}, byte);
    bit += 8;
  }
  return *this;
}

}  // namespace deep_ep::rdma::verbs::devx
