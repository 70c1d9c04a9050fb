// The exchanges of one buffer: all-gathers that carry a purpose and the buffer's number.
//
// Why: an all-gather pairs whatever the ranks bring next. A rank whose call has timed out destroys its buffer alone and
// makes a new one; another rank whose call went well is in the collective end of the old one. Without a header the one
// would read the other's "I am leaving" as options of the new buffer.
//
// The protocol. A round is an all-gather of one frame per rank: a header and a part of the message. All ranks see all
// headers, and each judges them by the same pure function (`is_done`):
//   1. A rank is in an exchange of a buffer that another rank has left alone: its exchange ends (PeerLeft).
//   2. Another rank's exchange ends by rule 1: this rank brings its frame again in the next round.
//   3. All ranks bring the same purpose, buffer and step: the exchange is done.
//   4. Anything else is a mistake of the program: RankMismatch on all ranks.
// So no message has to be kept for later, and every transport serves that has an all-gather.
//
// A rank whose own step between two exchanges fails (see agree()) brings a frame that says so instead of its next
// message. The others throw that text in this exchange, so steps that go well cost no exchange of their own.
//
// Numbers. A rank proposes a number above all it has seen. The first exchange of a buffer agrees on the largest
// proposal, so ranks need not have counted alike. A header has the newest buffers that the rank has not left; no number
// is used twice.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep {

/// What an exchange is for. The values travel.
enum class Purpose : std::uint32_t { making, destroying, resuming, sleeping };

/// Ahead of each message. The values travel between processes of one version of the library.
struct ExchangeHeader {
  std::uint32_t magic = kMagic;
  Purpose purpose = Purpose::making;
  std::uint64_t buffer = 0;  ///< its number
  std::uint64_t step = 0;    ///< how many frames for this purpose came before
  std::uint64_t bytes = 0;   ///< of the message
  std::uint64_t failed = 0;  ///< 1: a step of this rank failed before this exchange, and the message is the text
  /// The buffers that this rank has not left, newest first, then 0. If it is full, nothing is known of older ones.
  std::array<std::uint64_t, 64> here = {};

  static constexpr std::uint32_t kMagic = 0x50454508;  ///< 8: the version of what ranks tell each other by any means

  /// The number is a proposal.
  bool is_proposal() const { return purpose == Purpose::making && step == 0; }
  bool has_left(std::uint64_t number) const {
    return number > here.back() && std::ranges::find(here, number) == here.end();
  }
  /// "making buffer 3 (exchange 0)"
  std::string describe() const;
};

/// The same headers on all ranks give each rank its part of one outcome: see above. False: this rank brings its frame
/// again. @throws PeerLeft, RankMismatch.
bool is_done(std::span<const ExchangeHeader> ranks, int rank);

class BufferExchanges final : public Bootstrap {
 public:
  explicit BufferExchanges(std::shared_ptr<Bootstrap> group);
  /// This rank takes part in no further exchange of the buffer; the others learn it from the next ones of the group.
  ~BufferExchanges() override;
  BufferExchanges(const BufferExchanges&) = delete;
  BufferExchanges& operator=(const BufferExchanges&) = delete;

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  /// @throws PeerLeft, RankMismatch, and what the group's throws.
  std::vector<std::byte> all_gather(std::span<const std::byte> mine) override;

  /// Runs `step`, which may have exchanges, on this rank: all that ranks do to make a buffer is one step. When it fails
  /// anywhere, every rank throws, or peers would wait in their next exchange: the ranks where it failed their own
  /// exception, the others, in that exchange, a SystemError "<what> failed on rank 3: <its text>".
  void agree(std::string_view what, const std::function<void()>& step);

  /// How long an exchange waits for other ranks while the buffer is made; 0: for ever. Only transports that ask the
  /// InterruptScope meanwhile end in time: those of the library, and of Python, but not a C++ callback that blocks.
  void limit_making(double seconds) { limit_s_ = seconds; }

  /// Asked while an exchange waits: throws PeerLeft where a rank will not come. Empty: nobody knows.
  void end_waits_by(std::function<void()> look) { end_waits_ = std::move(look); }

  /// The exchanges from here on have this purpose.
  void begin(Purpose purpose);

 private:
  struct Frame;
  std::vector<Frame> gather_frames(std::span<const std::byte> part);

  std::shared_ptr<Bootstrap> group_;
  ExchangeHeader next_;
  std::function<void()> end_waits_;
  double limit_s_ = 0;
  bool failed_ = false;  ///< the last exchange of a step
};

}  // namespace deep_ep
