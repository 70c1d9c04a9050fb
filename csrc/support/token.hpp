// Random numbers of the system, and tokens of 128 bits.
#pragma once

#include <fmt/format.h>
#include <sys/random.h>

#include <array>
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

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

/// The same for equal texts, on all machines. Different texts give different tokens, unless somebody looks for two that
/// do not: a token keeps those apart that do not know of each other, it is no proof against forgery.
inline Token token_of(std::string_view text) {
  const auto digest = [&](std::uint64_t state) {  // FNV-1a, and a mixer that spreads the last bytes
    for (const char byte : text) state = (state ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
    state = (state ^ (state >> 32)) * 0xd6e8feb86659fd93;
    return state ^ (state >> 32);
  };
  return {{digest(0xcbf29ce484222325), digest(0x9e3779b97f4a7c15)}};
}

}  // namespace deep_ep
