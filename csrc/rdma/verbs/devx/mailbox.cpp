#include "csrc/rdma/verbs/devx/mailbox.hpp"

#include <algorithm>
#include <stdexcept>

#include "csrc/support/format.hpp"

namespace deep_ep::rdma::verbs::devx {

Mailbox::Mailbox(std::uint32_t bits) : bytes_(bits / 8) {}

void Mailbox::check(Field field) const {
  if (field.width == 0 || field.width > 64 || field.bit + field.width > 8 * bytes_.size()) {
    throw std::logic_error(fmt::format("no field of {} bits at bit {:#x} of a mailbox of {} bytes", field.width,
                                       field.bit, bytes_.size()));
  }
}

Mailbox& Mailbox::set(Field field, std::uint64_t value) {
  check(field);
  if (field.width < 64 && value >> field.width != 0) {
    throw std::logic_error(fmt::format("{:#x} does not fit into {} bits at bit {:#x}", value, field.width, field.bit));
  }
  for (std::uint32_t i = 0; i < field.width; ++i) {
    const std::uint32_t bit = field.bit + field.width - 1 - i;
    const auto mask = static_cast<std::uint8_t>(0x80U >> bit % 8);
    std::uint8_t& byte = bytes_[bit / 8];
    byte = static_cast<std::uint8_t>((value >> i & 1) != 0 ? byte | mask : byte & ~mask);
  }
  return *this;
}

std::uint64_t Mailbox::get(Field field) const {
  check(field);
  std::uint64_t value = 0;
  for (std::uint32_t bit = field.bit; bit < field.bit + field.width; ++bit) {
    value = value << 1 | (bytes_[bit / 8] >> (7 - bit % 8) & 1);
  }
  return value;
}

Mailbox& Mailbox::set_bytes(std::uint32_t bit, std::span<const std::uint8_t> bytes) {
  if (bit % 8 != 0 || bit / 8 + bytes.size() > bytes_.size()) {
    throw std::logic_error(fmt::format("no {} bytes at bit {:#x} of a mailbox", bytes.size(), bit));
  }
  std::copy(bytes.begin(), bytes.end(), bytes_.begin() + bit / 8);
  return *this;
}

}  // namespace deep_ep::rdma::verbs::devx
