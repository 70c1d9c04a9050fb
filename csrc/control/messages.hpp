// Messages of control threads to each other: a hello, then messages of one size. A control thread interprets nothing
// that a caller sends before it has compared the caller's token.
#pragma once

#include <cstdint>

#include "csrc/support/token.hpp"

namespace deep_ep::control {

inline constexpr std::uint32_t kMagic = 0x43504544;  // "DEPC"
inline constexpr std::uint16_t kVersion = 2;

/// First on each connection, in both directions.
struct Hello {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  std::uint16_t bytes = sizeof(Hello);
  Token secret = {};  ///< the receiver's token, which only processes of the job know
  Token from = {};    ///< the process that sends this

  bool well_formed() const { return magic == kMagic && version == kVersion && bytes == sizeof(Hello); }
};

/// All but `ended` are about `rank` of `buffer`, a rank of the process that sends the message.
enum class MessageType : std::uint16_t {
  left = 1,    ///< it has left the buffer: its process may end
  gave_up,     ///< it has ended its calls, as it waited for `peer` in vain; `why`, if it knows
  ended,       ///< `process`, which lives on the host of the sender, has ended
  waits,       ///< it has waited for `peer` for `ns`, which is longer than the time-out if `flag`; 0: no longer
  failed,      ///< a queue pair of it to `peer` has failed
  lost,        ///< the verdict, with masks: all go on without `peer`, for the reason `why`, found by rank `by`
  leaves_out,  ///< its program leaves `peer` out (`flag`), or does so no longer
  arrived,     ///< it has come to the end of the buffer
};

struct Message {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  MessageType type = MessageType::left;
  std::uint64_t buffer = 0;
  std::uint32_t round = 0;  ///< of the buffer's verdicts: one more with each Membership::resume()
  std::uint32_t flag = 0;
  std::int32_t rank = 0;
  std::int32_t peer = 0;
  std::int32_t by = 0;
  std::uint32_t why = 0;
  std::uint32_t wanted = 0;
  std::uint32_t unused = 0;
  std::uint64_t ns = 0;
  Token process = {};

  bool well_formed() const { return magic == kMagic && version == kVersion; }
};

}  // namespace deep_ep::control
