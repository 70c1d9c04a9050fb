#include "csrc/bootstrap/buffer_exchanges.hpp"

#include <chrono>
#include <exception>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "csrc/support/program_code.hpp"
#include "deep_ep/interrupt.hpp"

namespace deep_ep {

namespace {

constexpr double kWarnAfterS = 10;
constexpr double kUntilAnEndIsKnownS = 0.5;

}  // namespace

/// The buffers that this rank has made over a group. They may be dropped by any thread.
class BuffersOfGroup {
 public:
  std::mutex mutex;
  std::uint64_t newest = 0;  ///< the largest number that this rank has proposed or heard
  std::set<std::uint64_t, std::greater<>> here;
};

std::string ExchangeHeader::describe() const {
  constexpr std::array kNames = {"making", "destroying", "resuming low-latency calls of", "suspending or resuming"};
  const std::string whose = is_proposal() ? "a new buffer" : fmt::format("buffer {}", buffer);
  const auto name = static_cast<std::size_t>(purpose);
  return fmt::format("{} {} (exchange {})", name < kNames.size() ? kNames[name] : "another step of", whose, step);
}

bool is_done(std::span<const ExchangeHeader> ranks, int rank) {
  const ExchangeHeader& own = ranks[static_cast<std::size_t>(rank)];
  const auto first = [&](const auto& is_one) { return std::ranges::find_if(ranks, is_one) - ranks.begin(); };
  const auto size = std::ssize(ranks);
  const auto left_by = [&](const ExchangeHeader& of) {
    return of.is_proposal() ? size : first([&](const ExchangeHeader& by) { return by.has_left(of.buffer); });
  };
  const auto stranger = first([](const ExchangeHeader& one) { return one.magic != ExchangeHeader::kMagic; });
  if (stranger != size) {
    fail<RankMismatch>(
        "exchange: rank {} got from rank {} what is no exchange of a buffer: do all ranks use the same version of the "
        "library, and does the program use the group for nothing else meanwhile?",
        rank, stranger);
  }
  const auto gone = left_by(own);
  if (gone != size) {
    fail<PeerLeft>(
        "rank {} has left buffer {}, which failed or was dropped there, while rank {} was {}: destroy the buffer and "
        "make a new one",
        gone, own.buffer, rank, own.describe());
  }
  if (first([&](const ExchangeHeader& one) { return left_by(one) != size; }) != size) return false;
  const auto other = first([&](const ExchangeHeader& theirs) {
    const bool same_buffer = theirs.buffer == own.buffer || own.is_proposal();
    return theirs.purpose != own.purpose || theirs.step != own.step || !same_buffer;
  });
  if (other == size) return true;
  fail<RankMismatch>(
      "exchange: rank {} is {}, but rank {} is {}: all ranks must make, resume and destroy their buffers in the same "
      "order",
      rank, own.describe(), other, ranks[static_cast<std::size_t>(other)].describe());
}

/// All rounds have this size, whatever the message: a transport may have kept the bytes of a rank that was interrupted
/// in its last round, and pairs them with what another rank brings next. Large enough for what a buffer's ranks tell
/// each other in one round.
struct BufferExchanges::Frame {
  ExchangeHeader header;
  std::array<std::byte, 4096 - sizeof(ExchangeHeader)> part{};
};

BufferExchanges::BufferExchanges(std::shared_ptr<Bootstrap> group) : group_(std::move(group)) {
  if (group_->buffers_ == nullptr) group_->buffers_ = std::make_shared<BuffersOfGroup>();
}

BufferExchanges::~BufferExchanges() {
  const std::lock_guard lock(group_->buffers_->mutex);
  group_->buffers_->here.erase(next_.buffer);
}

std::vector<std::byte> BufferExchanges::all_gather(std::span<const std::byte> mine) {
  const bool makes = next_.purpose == Purpose::making;
  const Deadline limit(makes ? limit_s_ : 0);
  Deadline warning(makes ? kWarnAfterS : 0);
  std::exception_ptr left;
  const auto end_waits = [&] {
    try {
      if (end_waits_) end_waits_();
    } catch (const PeerLeft&) {
      left = std::current_exception();
      throw;
    }
    if (warning.expired()) {
      log::warn("exchange: rank {} of {} has waited {} s for other ranks, {}", rank(), size(), warning.seconds(),
                next_.describe());
      warning = Deadline(0);
    }
    if (limit.expired()) {
      fail<TimeoutError>(
          "exchange: rank {} of {} waited {} s for other ranks, {}: do all ranks make their buffers, and in the same "
          "order?",
          rank(), size(), limit.seconds(), next_.describe());
    }
    return InterruptScope::wanted();  // the caller's
  };
  end_waits();
  const InterruptScope waits(end_waits);
  failed_ = true;
  next_.bytes = mine.size();
  std::vector<std::byte> all(mine.size() * static_cast<std::size_t>(size()));
  std::size_t done = 0;
  try {
    do {
      const std::span<const std::byte> part = mine.subspan(done, std::min(mine.size() - done, sizeof Frame::part));
      const std::vector<Frame> frames = gather_frames(part);
      for (std::size_t peer = 0; peer < frames.size(); ++peer) {
        std::copy_n(frames[peer].part.begin(), part.size(), all.data() + peer * mine.size() + done);
      }
      done += part.size();
    } while (done < mine.size());
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {                     // of a callback
    if (left != nullptr) std::rethrow_exception(left);  // not what another language has made of it
    // The end of a process may break the group's connections before the control plane knows of it.
    for (const Deadline soon(kUntilAnEndIsKnownS); end_waits_ && !soon.expired();) {
      end_waits_();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    throw;
  }
  failed_ = false;
  return all;
}

/// Collective: the next part of a message. Further rounds follow as long as other ranks end exchanges of buffers that
/// are over.
std::vector<BufferExchanges::Frame> BufferExchanges::gather_frames(std::span<const std::byte> part) {
  BuffersOfGroup& buffers = *group_->buffers_;
  Frame mine;
  std::ranges::copy(part, mine.part.begin());
  std::vector<Frame> frames;
  std::vector<ExchangeHeader> headers;
  do {
    {
      const std::lock_guard lock(buffers.mutex);
      // Only now: a rank that is refused for its arguments has not begun.
      if (next_.buffer == 0) next_.buffer = ++buffers.newest;
      mine.header = next_;
      std::copy_n(buffers.here.begin(), std::min(buffers.here.size(), next_.here.size()), mine.header.here.begin());
    }
    {
      const ProgramCode gathers;
      frames = all_gather_values(*group_, mine);
    }
    headers.clear();
    for (const Frame& theirs : frames) headers.push_back(theirs.header);
  } while (!is_done(headers, rank()));
  if (next_.is_proposal()) {
    next_.buffer = std::ranges::max(headers, {}, &ExchangeHeader::buffer).buffer;
    const std::lock_guard lock(buffers.mutex);
    buffers.here.insert(next_.buffer);
    buffers.newest = std::max(buffers.newest, next_.buffer);
  }
  ++next_.step;
  for (const auto& [header, text] : frames) {
    if (header.failed == 0) continue;
    throw SystemError({reinterpret_cast<const char*>(text.data()), std::min<std::size_t>(header.bytes, text.size())});
  }
  const std::uint64_t size = headers[0].bytes;
  const auto other = std::ranges::find_if(headers, [&](const ExchangeHeader& one) { return one.bytes != size; });
  if (other != headers.end()) {
    fail<RankMismatch>(
        "all_gather: rank 0 brought {} bytes and rank {} brought {}; all ranks must bring the same number", size,
        other - headers.begin(), other->bytes);
  }
  return frames;
}

void BufferExchanges::agree(std::string_view what, const std::function<void()>& step) try {
  failed_ = false;
  step();
} catch (const std::exception& error) {
  if (failed_) throw;  // the other ranks have this failure already, or cannot be reached
  try {
    std::string text = fmt::format("{} failed on rank {}: {}", what, rank(), error.what());
    text.resize(std::min(text.size(), sizeof(Frame::part)));
    next_.failed = 1;
    all_gather(std::as_bytes(std::span(text)));
  } catch (const std::exception&) {
    // The failure is the cause; that the others could not be told, or have failed as well, follows from it.
  }
  next_.failed = 0;
  throw;
}

void BufferExchanges::begin(Purpose purpose) {
  next_.purpose = purpose;
  next_.step = 0;
}

}  // namespace deep_ep
