// How a call's rows and words get to a far rank: one warp, the only owner of the queue pair of its channel, posts what
// other blocks have staged, in the order of slots (dispatch) or tokens (combine).
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
#include "kernels/rdma/poster.hpp"

namespace deep_ep::device::low_latency {

DEEP_EP_DEVICE const RdmaPeerParams& queue_pair(const LowLatencyParams& common, int channel, int peer) {
  return common.peers[channel * common.num_ranks + peer];
}

/// One lane to one far rank in one call, by a whole warp: see rdma::Poster.
template <class Reach>
class CallPoster : public rdma::Poster<WholeWarp, MaskOrEnd<true>> {
 public:
  /// `words`: of the warp.
  DEEP_EP_DEVICE CallPoster(const Reach& reach, const PostedLane& to, rdma::PosterWords& words)
      : Poster(load(words, reach.common, to).pair, reach.common.posts, MaskOrEnd<true>{reach.common}),
        reach_(reach),
        lane_(to.lane),
        progress_(word(window().progress(Reach::kCall, reach.epoch, rank(), to.lane),
                       told().progress[to.lane][reach.epoch & 1])) {}

  /// What precedes all rows, and words that no row waits for, go by the first lane.
  DEEP_EP_DEVICE bool is_first_lane() const { return lane_ == 0; }
  /// Does row `number` go by this lane?
  DEEP_EP_DEVICE bool takes(int number) const { return reach_.lane_of(number) == lane_; }

  /// Tells the peer up to which call this rank has received.
  DEEP_EP_DEVICE bool acknowledge(std::uint64_t received) {
    rdma::ToldWord acknowledged = word(window().acknowledged(Reach::kCall, rank()), told().acknowledged);
    return tell(acknowledged, received);
  }
  /// Tells it that this rank has begun to send the call.
  DEEP_EP_DEVICE bool begin() {
    rdma::ToldWord begun = word(window().begun(Reach::kCall, rank()), told().begun);
    return tell(begun, reach_.epoch);
  }
  /// Tells it that everything of this lane up to `place` of the call is there: see progress_value.
  DEEP_EP_DEVICE bool progress(int place) {
    return tell(progress_, LowLatencyMailbox::progress_value(reach_.epoch, place));
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

 private:
  DEEP_EP_DEVICE static rdma::PosterWords& load(rdma::PosterWords& words, const LowLatencyParams& common,
                                                const PostedLane& to) {
    words.load(queue_pair(common, channel_of(Reach::kCall, to.lane), to.rank));
    return words;
  }
  DEEP_EP_DEVICE const LowLatencyWindow& window() const { return reach_.common.window; }
  DEEP_EP_DEVICE int rank() const { return reach_.common.rank; }
  DEEP_EP_DEVICE LowLatencyMailbox& told() const {
    return reach_.common.told[peer()].mailbox[static_cast<int>(Reach::kCall)];
  }

  const Reach& reach_;
  int lane_;
  rdma::ToldWord progress_;
};

}  // namespace deep_ep::device::low_latency
