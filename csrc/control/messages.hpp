// Messages of control threads to each other: a hello, then messages of one size. A control thread interprets nothing
// that a caller sends before it has compared the caller's token.
#pragma once

#include <cstdint>

#include "csrc/control/verdict.hpp"
#include "csrc/support/token.hpp"

namespace deep_ep::control {

inline constexpr std::uint32_t kMagic = 0x43504544;  // "DEPC"
inline constexpr std::uint16_t kVersion = 4;

/// First on each connection, in both directions.
struct Hello {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  std::uint16_t bytes = sizeof(Hello);
  Token secret = {};  ///< the receiver's token, which only processes of the job know
  Token from = {};    ///< the process that sends this

  bool shows(const Token& token) const {
    return magic == kMagic && version == kVersion && bytes == sizeof(Hello) && secret == token;
  }
};

enum class LostWhy : std::uint32_t {
  unknown,
  gone,    ///< its process has ended
  silent,  ///< others have waited for it for longer than the time-out, and it has reported no wait of its own
  ended,   ///< it has ended its calls
  failed,  ///< it cannot be reached by RDMA
};
struct LostRank {
  int rank = 0;
  LostWhy why = LostWhy::unknown;
  int by = kNobody;          ///< the rank whose report decided
  std::uint32_t wanted = 0;  ///< silent: what that rank waited for ...
  double waited_s = 0;       ///< ... and for how long
};

/// All but `ended` are of `rank` of `buffer`, a rank of the process that sends the message, and about another one.
enum class MessageType : std::uint16_t {
  left = 1,    ///< it makes no more calls, and its process may end
  gave_up,     ///< it has ended its calls, as it waited for that rank in vain
  ended,       ///< `process`, which lives on the host of the sender, has ended
  waits,       ///< it has waited for that rank, for longer than the time-out if `flag`; for 0 s: no longer
  failed,      ///< a queue pair of it to that rank has failed
  lost,        ///< the verdict, with masks: all go on without that rank
  leaves_out,  ///< its program leaves that rank out (`flag`), or does so no longer
};

struct Message {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  MessageType type = MessageType::left;
  std::uint64_t buffer = 0;
  std::uint32_t round = 0;  ///< of the buffer's verdicts: one more with each Membership::resume()
  std::int32_t rank = 0;
  LostRank about = {};
  std::uint64_t flag = 0;
  Token process = {};

  bool well_formed() const { return magic == kMagic && version == kVersion; }
};

}  // namespace deep_ep::control
