// Messages of control threads to each other: a hello, then reports. A control thread interprets nothing that a caller
// sends before it has compared the caller's token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/bootstrap/sockets.hpp"
#include "csrc/control/verdict.hpp"
#include "csrc/support/token.hpp"

namespace deep_ep::control {

/// First on each connection, in both directions.
struct Hello {
  Token secret = {};  ///< the receiver's token, which only processes of the job know, and of the same version
  Token from = {};    ///< the process that sends this
};

/// The part of a report that is about a peer, since the last Membership::resume().
struct PeerReport {
  LostRank verdict = {};       ///< on the peer; why unknown: it is not lost
  std::int64_t waited_ns = 0;  ///< a wait for the peer has lasted for so long; 0: none does
  std::uint32_t wanted = 0;    ///< what it is for
  std::uint16_t failed = 0;    ///< a queue pair to the peer has failed
  std::uint16_t left_out = 0;  ///< the program leaves the peer out

  bool says_nothing() const {
    return verdict.why == LostWhy::unknown && waited_ns == 0 && failed == 0 && left_out == 0;
  }
};

/// How a rank ends its part of a buffer. The values travel. A goodbye is sent behind all that the rank has enqueued:
/// what it has sent for its calls is visible then, and nothing follows.
enum class Goodbye : std::uint32_t {
  none,
  meets,  ///< it makes no more calls, and waits in the exchanges of destroy
  alone,  ///< it takes part in no exchange, either
  ended,  ///< all its exchanges have ended, and its process may end
};

struct ReportHead {
  std::uint64_t buffer = 0;
  std::uint32_t round = 0;  ///< one more with each Membership::resume()
  std::int32_t rank = 0;
  std::int32_t gave_up_on = kNobody;  ///< see RankFacts
  std::uint32_t peers = 0;            ///< of which the report says something, as it travels
  Goodbye left = Goodbye::none;       ///< only grows
  std::uint32_t waits = 0;            ///< it waits itself: it is not to blame
  std::uint64_t calls = 0;            ///< how many it has made: ControlWords::calls
};

/// All that a rank says. A report takes the place of the one before, so one that is lost does no harm. A rank keeps the
/// reports of all others: so a report has no place for peers that it says nothing of.
struct Report : ReportHead {
  std::vector<PeerReport> of = {};

  const PeerReport& about(int peer) const;
  PeerReport& about(int peer);
  /// The peer that it waits for longest; kNobody: it does not wait.
  int waits_for() const;

  static constexpr std::size_t kMostBytes = std::size_t{1} << 20;  ///< of one as it travels

  void send(Connection& to) const;
  /// The next report. False: not all of it has come.
  bool take(Connection& from);
};

}  // namespace deep_ep::control
