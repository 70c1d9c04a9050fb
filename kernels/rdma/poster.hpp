// How rows and words get to a remote rank: one warp (or thread), the only owner of a queue pair, posts what other warps
// have staged.
//
// Order is all there is to rely on: an addition becomes visible behind the bytes posted before it. So a poster puts
// rows in a known order and adds to one word, how far it has come, which the receiver waits for.
//
// Words at the peer only grow, and what is posted is the difference to what was posted before. So calls that were
// skipped make the next addition larger, and nothing is ever reset.
#pragma once

#include <type_traits>

#include "kernels/common/place.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/rdma/port_channel.hpp"

namespace deep_ep::device::rdma {

/// What every entry needs: in shared memory, one for each warp that posts.
struct alignas(16) PosterWords {
  RdmaPeerParams pair;  ///< a copy

  /// By a whole warp: copies `from`.
  DEEP_EP_DEVICE void load(const RdmaPeerParams& from) {
    constexpr int kWords = static_cast<int>(sizeof(RdmaPeerParams) / sizeof(std::uint64_t));
    static_assert(sizeof(RdmaPeerParams) % sizeof(std::uint64_t) == 0);
    for (int i = lane_index(); i < kWords; i += kWarpSize) {
      reinterpret_cast<std::uint64_t*>(&pair)[i] = load_stream(reinterpret_cast<const std::uint64_t*>(&from) + i);
    }
    warp::sync();
  }
};

/// A word of the peer's heap that this rank adds to.
struct ToldWord {
  Place<std::uint64_t> place;
  std::uint64_t* told;  ///< in device memory: what it will be once all that was posted has arrived
  std::uint64_t value;  ///< of *told
};

/// A row that other warps stage for a poster.
enum class StagedRow { awaited, staged, nothing };

/// One remote rank during one kernel. All members of the group make every call, with the same arguments unless it says
/// otherwise. Functions that return bool return false when the rank is to be left: it is given up, or the call is over.
///
/// A policy says what becomes of failures, besides what wait_until() asks:
///   bool gives_up(int peer)                   nothing need be posted to it any more
///   void blame_queue(const RdmaQueuePair&)    by one thread: the queue pair has failed
template <class Group, class Policy>
class Poster {
 public:
  /// `pair` and `wait` stay where they are.
  DEEP_EP_DEVICE Poster(const RdmaPeerParams& pair, const WaitContext& wait, const Policy& policy)
      : pair_(pair), policy_(policy), queue_(pair, wait), found_posted_(queue_.posted()) {}

  DEEP_EP_DEVICE int peer() const { return pair_.queue.peer; }

  /// A word of the peer, as far as this rank has raised it.
  DEEP_EP_DEVICE ToldWord word(Place<std::uint64_t> place, std::uint64_t& told) const {
    return {place, &told, Group::from_leader(Group::leads() ? told : std::uint64_t{0})};
  }
  /// Makes the word `value`, behind everything posted before. Nothing to do where it is that or more.
  DEEP_EP_DEVICE bool tell(ToldWord& word, std::uint64_t value) {
    if (value <= word.value) return true;
    const bool good = held(queue_.signal_add(word.place.offset, value - word.value, Group::leads()));
    word.value = value;
    if (good && Group::leads()) *word.told = value;
    return good;
  }

  /// Waits until the peer sees all that was posted: an addition of nothing to `word` of its heap comes behind that.
  DEEP_EP_DEVICE bool settle(Place<std::uint64_t> word) {
    return held(queue_.signal_add(word.offset, 0, Group::leads())) && held(queue_.quiet());
  }

  /// Copies from this rank's heap into the peer's. Each member for itself.
  template <class T>
  DEEP_EP_DEVICE bool put(Place<T> to, Place<T> from, std::uint32_t bytes, bool wanted) {
    return held(queue_.put(to.offset, from.offset, bytes, wanted));
  }
  DEEP_EP_DEVICE void flush() { queue_.flush(); }

  /// Posts up to 32 rows, a lane each (those with `mine`), in the order of the lanes, and never holds back one that is
  /// ready with all before it. `state()` says whether the lane's row is staged; `put_rows(posts)` puts those of the
  /// lanes with `posts`; `progress(place)` tells the peer that all rows up to `place` are posted, which is a number of
  /// the lane's row.
  ///
  /// Where an addition waits for the writes before it, each costs a round trip, in series. So the peer is told again
  /// only when what it was told before has arrived; call tell_rest() behind the last rows.
  template <class State, class PutRows, class Progress>
  DEEP_EP_DEVICE bool post_rows(bool mine, int place, State state, PutRows put_rows, Progress progress) {
    static_assert(std::is_same_v<Group, WholeWarp>, "every lane has a row");
    std::uint32_t left = warp::ballot(mine);
    while (left != 0) {
      StagedRow row = StagedRow::nothing;
      std::uint32_t now = 0;
      const auto some_news = [&](Poll&) {
        row = (left >> lane_index() & 1) != 0 ? state() : StagedRow::nothing;
        const std::uint32_t awaited = warp::ballot(row == StagedRow::awaited);
        now = awaited == 0 ? left : left & ((1u << lowest_bit(awaited)) - 1);
        return now != 0 || may_tell();
      };
      if (!poll_until(some_news, [&](const Poll&) { return leaves(); })) return false;
      if (now != 0) {
        const bool mine_now = (now >> lane_index() & 1) != 0;
        if (!put_rows(mine_now && row == StagedRow::staged)) return false;
        untold_ = warp::max(mine_now ? place : 0);
        left &= ~now;
      }
      if (may_tell()) {
        if (!tell_rest(progress)) return false;
      } else {
        flush();
      }
    }
    return true;
  }
  /// Tells the peer of the rows that it has not been told of.
  template <class Progress>
  DEEP_EP_DEVICE bool tell_rest(Progress progress) {
    if (untold_ == 0) return true;
    if (!progress(untold_)) return false;
    flush();
    untold_ = 0;
    last_told_ = queue_.posted();
    return true;
  }

  /// Waits for the completions of what earlier kernels had posted: what these had staged may be written again by the
  /// next kernel. Those of a rank that has been given up may never come.
  DEEP_EP_DEVICE void await_earlier() {
    if (!leaves()) held(queue_.wait_for(found_posted_));
  }
  /// Gives the queue pair back.
  DEEP_EP_DEVICE void close() { held(queue_.close()); }

 private:
  DEEP_EP_DEVICE bool may_tell() { return untold_ != 0 && queue_.reached(last_told_); }
  DEEP_EP_DEVICE bool leaves() const { return Group::any(policy_.gives_up(peer())); }
  DEEP_EP_DEVICE bool held(bool good) const {
    if (good) return true;
    if (Group::leads()) policy_.blame_queue(pair_.queue);
    Group::sync();
    return false;
  }

  const RdmaPeerParams& pair_;
  Policy policy_;
  PortChannel<Group> queue_;
  std::uint64_t found_posted_;
  std::uint64_t last_told_ = 0;  ///< ticket of the last progress
  int untold_ = 0;               ///< place up to which rows are posted; 0: the peer has been told of all
};

}  // namespace deep_ep::device::rdma
