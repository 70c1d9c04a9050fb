// How a call's rows and words get to a far rank: one warp, the only owner of the queue pair of its channel, posts what
// other blocks have staged, in the order of slots (dispatch) or tokens (combine).
//
// Order is all there is to rely on: an addition becomes visible behind the bytes posted before it. So a poster puts
// rows in a known order and adds to one word, how far it has come, which the receiver waits for. Words at the peer only
// grow, and what is posted is the difference to what was posted before. So calls that were skipped make the next
// addition larger, and nothing is ever reset.
//
// With several lanes there are as many such warps, each with a queue pair of its own, which are not ordered among each
// other. Row i goes by lane i modulo the lanes, and each lane says how far it has come; all else goes by the first one.
//
//   poster, for one peer                                receiver
//   add: calls received so far                          (its next call but one may use our window)
//   wait until the peer has received call n - 2
//   put counts or selections                            reads them with the first rows; after the selections, for
//                                                       which rows wait, comes: add n, 0
//   as rows become ready, in order: put                 reads rows up to i - 1
//   add: progress n, i, one under way at a time
//   see the completions of the call before              (nothing: this frees staging memory for the next call)
//
// A rank that is masked is not waited for, so a NIC may still read for it what is written again. It has to be a NIC
// that neither finished nor gave up within two calls; the rank finds other tags in those rows, and waits for ours in
// vain. Only a line that is read while it is written could have our tag and other bytes.
#pragma once

#include "kernels/low_latency/transport/reach.hpp"

namespace deep_ep::device::low_latency {

DEEP_EP_DEVICE const RdmaPeerParams& queue_pair(const LowLatencyParams& common, int channel, int peer) {
  return common.peers[channel * common.num_ranks + peer];
}

/// A row that other warps stage for a poster.
enum class StagedRow { awaited, staged, nothing };

/// One lane to one far rank in one call, by a whole warp. All lanes make every call, with the same arguments unless it
/// says otherwise. Functions that return bool return false when the rank is to be left: it is given up, or the call is
/// over.
template <class Reach>
class CallPoster {
 public:
  /// `words`: of the warp.
  DEEP_EP_DEVICE CallPoster(const Reach& reach, const PostedLane& to, rdma::PosterWords& words)
      : reach_(reach),
        pair_(load(words, reach.common, to)),
        queue_(pair_, reach.common.posts),
        lane_(to.lane),
        found_posted_(queue_.posted()),
        progress_(WholeWarp::from_leader(lane_index() == 0 ? told_progress() : std::uint64_t{0})) {}

  DEEP_EP_DEVICE int peer() const { return pair_.queue.peer; }
  /// What precedes all rows, and words that no row waits for, go by the first lane.
  DEEP_EP_DEVICE bool is_first_lane() const { return lane_ == 0; }
  /// Does row `number` go by this lane?
  DEEP_EP_DEVICE bool takes(int number) const { return reach_.lane_of(number) == lane_; }

  /// Tells the peer up to which call this rank has received.
  DEEP_EP_DEVICE bool acknowledge(std::uint64_t received) {
    return raise(window().acknowledged(Reach::kCall, rank()), told().acknowledged, received);
  }
  /// Tells it that this rank has begun to send the call.
  DEEP_EP_DEVICE bool begin() { return raise(window().begun(Reach::kCall, rank()), told().begun, reach_.epoch); }
  /// Tells it that everything of this lane up to `place` of the call is there: see progress_value.
  DEEP_EP_DEVICE bool progress(int place) {
    const std::uint64_t value = LowLatencyMailbox::progress_value(reach_.epoch, place);
    return tell(window().progress(Reach::kCall, reach_.epoch, rank(), lane_), told_progress(), progress_, value);
  }

  /// Waits for room at the peer, acquiring. What was posted is on its way meanwhile: two ranks may wait for each other.
  DEEP_EP_DEVICE bool await_room() {
    bool there = lane_index() != 0 || reach_.has_room(reach_.load_acknowledged(peer()));
    if (!warp::all(there)) {
      flush();
      there = lane_index() != 0 || reach_.await_room(peer());
    }
    return warp::agree(there);
  }

  /// Copies from this rank's heap into the peer's. Each member for itself.
  template <class T>
  DEEP_EP_DEVICE bool put(Place<T> to, Place<T> from, std::uint32_t bytes, bool wanted) {
    return held(queue_.put(to.offset, from.offset, bytes, wanted));
  }
  DEEP_EP_DEVICE void flush() { queue_.flush(); }

  /// Posts up to 32 rows, a lane each (those with `mine`), in the order of the lanes, and never holds back one that is
  /// ready with all before it. `state()` says whether the lane's row is staged; `put_rows(posts)` puts those of the
  /// lanes with `posts`; `place` is a number of the lane's row, which the peer is told by progress(place).
  ///
  /// Where an addition waits for the writes before it, each costs a round trip, in series. So the peer is told again
  /// only when what it was told before has arrived; call tell_rest() behind the last rows.
  template <class State, class PutRows>
  DEEP_EP_DEVICE bool post_rows(bool mine, int place, State state, PutRows put_rows) {
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
        if (!tell_rest()) return false;
      } else {
        flush();
      }
    }
    return true;
  }
  /// Tells the peer of the rows that it has not been told of.
  DEEP_EP_DEVICE bool tell_rest() {
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
  DEEP_EP_DEVICE static const RdmaPeerParams& load(rdma::PosterWords& words, const LowLatencyParams& common,
                                                   const PostedLane& to) {
    words.load(queue_pair(common, channel_of(Reach::kCall, to.lane), to.rank));
    return words.pair;
  }
  DEEP_EP_DEVICE const LowLatencyWindow& window() const { return reach_.common.window; }
  DEEP_EP_DEVICE int rank() const { return reach_.common.rank; }
  DEEP_EP_DEVICE LowLatencyMailbox& told() const {
    return reach_.common.told[peer()].mailbox[static_cast<int>(Reach::kCall)];
  }
  DEEP_EP_DEVICE std::uint64_t& told_progress() const { return told().progress[lane_][reach_.epoch & 1]; }

  /// Makes a word of the peer's heap `value`, behind everything posted before. Nothing to do where it is that or more.
  /// `seen`: what it will be once all that was posted has arrived; `told` remembers that, in device memory.
  DEEP_EP_DEVICE bool tell(Place<std::uint64_t> word, std::uint64_t& told, std::uint64_t& seen, std::uint64_t value) {
    if (value <= seen) return true;
    const bool good = held(queue_.signal_add(word.offset, value - seen, lane_index() == 0));
    seen = value;
    if (good && lane_index() == 0) told = value;
    return good;
  }
  DEEP_EP_DEVICE bool raise(Place<std::uint64_t> word, std::uint64_t& told, std::uint64_t value) {
    std::uint64_t seen = WholeWarp::from_leader(lane_index() == 0 ? told : std::uint64_t{0});
    return tell(word, told, seen, value);
  }

  DEEP_EP_DEVICE bool may_tell() { return untold_ != 0 && queue_.reached(last_told_); }
  DEEP_EP_DEVICE bool leaves() const { return warp::any(reach_.policy().gives_up(peer())); }
  DEEP_EP_DEVICE bool held(bool good) const {
    if (good) return true;
    if (lane_index() == 0) reach_.policy().blame_queue(pair_.queue);
    warp::sync();
    return false;
  }

  const Reach& reach_;
  const RdmaPeerParams& pair_;
  rdma::PortChannel<WholeWarp> queue_;
  int lane_;
  std::uint64_t found_posted_;
  std::uint64_t progress_;       ///< that the peer has been told of
  std::uint64_t last_told_ = 0;  ///< ticket of the last progress
  int untold_ = 0;               ///< place up to which rows are posted; 0: the peer has been told of all
};

}  // namespace deep_ep::device::low_latency
