// Random numbers of the system, and tokens of 128 bits.
#pragma once

#include <fmt/format.h>
#include <sys/random.h>

#include <array>
#include <compare>
#include <cstdint>
#include <string>

#include "deep_ep/error.hpp"

namespace deep_ep {

/// All bits are random. Not std::random_device: linked statically it needs a newer glibc than everything else.
template <class T>
T random_bits() {
  T bits{};
  // Up to 256 bytes come whole once the system has started, and no signal interrupts that.
  if (::getrandom(&bits, sizeof bits, 0) != sizeof bits) throw SystemError("getrandom gave no random numbers");
  return bits;
}

/// Plain data, so that it can be part of a message.
struct Token {
  std::array<std::uint64_t, 2> words{};
  auto operator<=>(const Token&) const = default;
};

inline Token random_token() { return random_bits<Token>(); }

inline std::string to_string(const Token& token) {
  return fmt::format("{:016x}{:016x}", token.words[0], token.words[1]);
}

}  // namespace deep_ep
