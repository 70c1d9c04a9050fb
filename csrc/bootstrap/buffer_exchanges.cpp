#include "csrc/bootstrap/buffer_exchanges.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/exchanges.hpp"

namespace deep_ep {

/// The buffers that this rank has made over a group, as far as its headers tell of them. Buffers may be dropped by any
/// thread.
class BuffersOfGroup {
 public:
  std::uint64_t propose() {
    const std::lock_guard lock(mutex_);
    return ++newest_;
  }
  void enter(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    here_.insert(number);
    newest_ = std::max(newest_, number);
  }
  void leave(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    here_.erase(number);
  }
  void describe_to(ExchangeHeader& header) const {
    const std::lock_guard lock(mutex_);
    header.newest = newest_;
    header.oldest = here_.empty() ? newest_ + 1 : *here_.begin();
    header.left = 0;
    for (std::uint64_t back = 0; back < std::min<std::uint64_t>(newest_, 64); ++back) {
      if (!here_.contains(newest_ - back)) header.left |= std::uint64_t{1} << back;
    }
  }

 private:
  mutable std::mutex mutex_;
  std::uint64_t newest_ = 0;
  std::set<std::uint64_t> here_;
};

namespace {

/// All rounds have this size, whatever the message: a transport may have kept the bytes of a rank that was interrupted
/// in its last round, and pairs them with what another rank brings next. Large enough for what a buffer's ranks tell
/// each other in one round.
struct Frame {
  ExchangeHeader header;
  std::array<std::byte, 4096 - sizeof(ExchangeHeader)> part{};
};

std::string_view name_of(Purpose purpose) {
  constexpr std::array<std::string_view, 5> kNames = {"doing something unknown with", "making", "destroying",
                                                      "resuming low-latency calls of", "suspending or resuming"};
  const auto number = static_cast<std::size_t>(purpose);
  return kNames[number < kNames.size() ? number : 0];
}

std::vector<ExchangeHeader> headers_of(std::span<const Frame> frames, int rank) {
  std::vector<ExchangeHeader> headers;
  for (const Frame& frame : frames) {
    const ExchangeHeader& header = headers.emplace_back(frame.header);
    if (header.magic == ExchangeHeader::kMagic && header.version == ExchangeHeader::kVersion) continue;
    fail<RankMismatch>(
        "exchange: rank {} got from rank {} what is no exchange of a buffer: do all ranks use the same version of the "
        "library, and does the program use the group for nothing else meanwhile?",
        rank, headers.size() - 1);
  }
  return headers;
}

/// A round, and further ones as long as other ranks end exchanges of buffers that are over.
std::vector<Frame> exchange_frames(Bootstrap& group, const BuffersOfGroup& buffers, Frame frame) {
  const int rank = group.rank();
  for (;;) {
    buffers.describe_to(frame.header);
    std::vector<Frame> frames = all_gather_values(group, frame);
    const std::vector<ExchangeHeader> headers = headers_of(frames, rank);
    const Judgement judgement = judge(headers, rank);
    if (judgement.fate == Judgement::Fate::done) return frames;
    if (judgement.fate == Judgement::Fate::again) continue;
    if (judgement.fate == Judgement::Fate::peer_left) {
      fail<PeerLeft>(
          "rank {} has left buffer {}, which failed or was dropped there, while rank {} was {}: destroy the buffer and "
          "make a new one",
          judgement.peer, frame.header.buffer, rank, frame.header.describe());
    }
    fail<RankMismatch>(
        "exchange: rank {} is {}, but rank {} is {}: all ranks must make, resume and destroy their buffers in the same "
        "order",
        rank, frame.header.describe(), judgement.peer, headers[static_cast<std::size_t>(judgement.peer)].describe());
  }
}

/// A message, in as many frames as it needs. `next` is the header of the next one; where its number is a proposal, it
/// becomes what the ranks agree on.
std::vector<std::byte> exchange(Bootstrap& group, BuffersOfGroup& buffers, ExchangeHeader& next,
                                std::span<const std::byte> mine) {
  std::vector<std::byte> all(mine.size() * static_cast<std::size_t>(group.size()));
  std::size_t done = 0;
  do {
    Frame frame{.header = next};
    frame.header.bytes = mine.size();
    const std::span<const std::byte> part = mine.subspan(done, std::min(mine.size() - done, sizeof frame.part));
    std::copy(part.begin(), part.end(), frame.part.begin());
    const std::vector<Frame> frames = exchange_frames(group, buffers, frame);
    std::vector<std::uint64_t> sizes;
    std::uint64_t agreed = next.buffer;
    const Frame* failed = nullptr;
    for (const Frame& theirs : frames) {
      if (failed == nullptr && theirs.header.failed != 0) failed = &theirs;
      sizes.push_back(theirs.header.bytes);
      agreed = std::max(agreed, theirs.header.buffer);
    }
    if (next.is_proposal()) buffers.enter(next.buffer = agreed);
    ++next.step;
    if (failed != nullptr) {
      const std::size_t length = std::min<std::size_t>(failed->header.bytes, sizeof failed->part);
      throw SystemError(std::string(reinterpret_cast<const char*>(failed->part.data()), length));
    }
    require_equal_sizes(sizes);
    for (std::size_t peer = 0; peer < frames.size(); ++peer) {
      std::copy_n(frames[peer].part.begin(), part.size(), all.data() + peer * mine.size() + done);
    }
    done += part.size();
  } while (done < mine.size());
  return all;
}

}  // namespace

std::string ExchangeHeader::describe() const {
  const std::string whose = is_proposal() ? "a new buffer" : fmt::format("buffer {}", buffer);
  return fmt::format("{} {} (exchange {})", name_of(purpose), whose, step);
}

Judgement judge(std::span<const ExchangeHeader> ranks, int rank) {
  const auto left_by = [&](const ExchangeHeader& of) {
    if (of.is_proposal()) return -1;
    const auto found = std::ranges::find_if(ranks, [&](const ExchangeHeader& by) { return by.has_left(of.buffer); });
    return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
  };
  const ExchangeHeader& own = ranks[static_cast<std::size_t>(rank)];
  if (const int peer = left_by(own); peer >= 0) return {Judgement::Fate::peer_left, peer};
  for (std::size_t peer = 0; peer < ranks.size(); ++peer) {
    if (left_by(ranks[peer]) >= 0) return {Judgement::Fate::again, static_cast<int>(peer)};
  }
  for (std::size_t peer = 0; peer < ranks.size(); ++peer) {
    const ExchangeHeader& theirs = ranks[peer];
    const bool same =
        theirs.purpose == own.purpose && theirs.step == own.step && (theirs.buffer == own.buffer || own.is_proposal());
    if (!same) return {Judgement::Fate::mismatch, static_cast<int>(peer)};
  }
  return {};
}

std::shared_ptr<BufferExchanges> BufferExchanges::over(const std::shared_ptr<Bootstrap>& group) {
  if (auto already = std::dynamic_pointer_cast<BufferExchanges>(group)) return already;
  return std::make_shared<BufferExchanges>(group);
}

BufferExchanges::BufferExchanges(std::shared_ptr<Bootstrap> group) : group_(std::move(group)) {
  if (group_->buffers_ == nullptr) group_->buffers_ = std::make_shared<BuffersOfGroup>();
}

BufferExchanges::~BufferExchanges() { leave(); }

std::vector<std::byte> BufferExchanges::all_gather(std::span<const std::byte> mine) {
  if (over_) throw UseAfterDestroy("exchange of a buffer that this rank has left");
  // Only now: a rank that is refused for its arguments has not begun.
  if (next_.buffer == 0) next_.buffer = group_->buffers_->propose();
  const WaitEnd ends(end_waits_);
  failed_ = true;
  std::vector<std::byte> all = exchange(*group_, *group_->buffers_, next_, mine);
  failed_ = false;
  return all;
}

void BufferExchanges::tell_failure(std::string_view what, std::string_view why) noexcept {
  if (failed_) return;
  try {
    std::string text = fmt::format("{} failed on rank {}: {}", what, rank(), why);
    text.resize(std::min(text.size(), sizeof(Frame::part)));
    next_.failed = 1;
    all_gather(std::as_bytes(std::span(text)));
  } catch (const std::exception&) {
    // The failure is the cause; that the others could not be told, or have failed as well, follows from it.
  }
  next_.failed = 0;
}

void BufferExchanges::begin(Purpose purpose) {
  next_.purpose = purpose;
  next_.step = 0;
  failed_ = false;
}

void BufferExchanges::leave() noexcept {
  end_waits_ = nullptr;
  if (std::exchange(over_, true) || next_.buffer == 0) return;
  group_->buffers_->leave(next_.buffer);
}

std::shared_ptr<Bootstrap> make_buffer_exchanges(std::shared_ptr<Bootstrap> group) {
  if (!group) throw InvalidArgument("group is null");
  return std::make_shared<BufferExchanges>(std::move(group));
}

}  // namespace deep_ep
