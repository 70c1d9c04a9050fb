// The words of control threads to each other: a hello, then messages of one size. Nothing that a stranger sends is
// interpreted before its token has been compared.
#pragma once

#include <cstdint>

#include "csrc/support/token.hpp"

namespace deep_ep::control {

inline constexpr std::uint32_t kMagic = 0x43504544;  // "DEPC"
inline constexpr std::uint16_t kVersion = 1;

/// First on each connection, in both directions.
struct Hello {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  std::uint16_t bytes = sizeof(Hello);
  Token secret = {};  ///< the receiver's token, which only processes of the job know
  Token from = {};    ///< the process that sends this

  bool well_formed() const { return magic == kMagic && version == kVersion && bytes == sizeof(Hello); }
};

enum class Say : std::uint16_t {
  left = 1,     ///< `rank` has left `buffer`: its process may end
  gave_up = 2,  ///< `rank` has ended its calls of `buffer`, as it waited for `peer` in vain
  ended = 3,    ///< `process`, which lives on the host of the one that says so, has ended
};

struct Message {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  Say say = Say::left;
  std::uint64_t buffer = 0;
  std::int32_t rank = 0;
  std::int32_t peer = 0;
  Token process = {};

  bool well_formed() const { return magic == kMagic && version == kVersion; }
};

}  // namespace deep_ep::control
