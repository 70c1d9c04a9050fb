// How rows and words get to a rank that is reached by RDMA: one warp, the only owner of the queue pair of its channel,
// posts what other blocks have staged.
//
// Order is all there is to rely on: an addition becomes visible behind the bytes posted before it. So the poster puts
// rows in the order of their slots (dispatch) or tokens (combine) and adds to one word, how far it has come; the
// receiver waits for that word where it would look at the tags of a row's lines.
//
//   poster, for one peer                                receiver
//   add: calls received so far                          (its next call but one may use our window)
//   wait until the peer has received call n - 2
//   put counts or selections, add: progress n, 0        reads them
//   as rows become ready, in order: put, add: n, i      reads row i - 1
//   see the completions of the call before              (nothing: this frees staging memory for the next call)
//
// A rank that is masked is not waited for, so a NIC may still read for it what is written again. It has to be a NIC
// that neither finished nor gave up within two calls; the rank finds other tags in those rows, and waits for ours in
// vain. Only a line that is read while it is written could have our tag and other bytes.
#pragma once

#include "kernels/low_latency/transport/head.hpp"
#include "kernels/low_latency/transport/wait.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/warp.hpp"
#include "kernels/rdma/peer.hpp"

namespace deep_ep::device {

/// Is the rank reached by RDMA? Such a rank is not mapped here. `kRdma` false: known to be none such.
template <bool kRdma = true>
DEEP_EP_DEVICE bool is_far(const LowLatencyParams& common, int peer) {
  return kRdma && common.rdma.peers != nullptr &&
         (common.rdma.far[static_cast<unsigned>(peer) / 32] >> static_cast<unsigned>(peer) % 32 & 1) != 0;
}

/// Is this a block that posts?
DEEP_EP_DEVICE bool is_poster(const LowLatencyParams& common) { return block_index() >= common.working_blocks; }
/// In blocks that post: the rank that this warp serves; there may be none.
DEEP_EP_DEVICE int rank_of_poster(const LowLatencyParams& common) {
  return (block_index() - common.working_blocks) * block_warps() + warp_index();
}

/// How far `source`, which is far, has come with the rows of a call.
DEEP_EP_DEVICE const std::uint64_t* progress_word(const LowLatencyParams& common, LowLatencyKind kind,
                                                  std::uint64_t epoch, int source) {
  return reinterpret_cast<const std::uint64_t*>(common.local + common.window.progress_at(kind, epoch, source));
}

/// Where the waits for a rank's queue pair put a fault. With masking it is that rank's record, and an abort word that
/// concerns nobody else: the call goes on.
DEEP_EP_DEVICE WaitContext context_of_queue(const LowLatencyParams& common, int peer) {
  if (common.mask == nullptr) return common.wait;
  return {common.masked + peer, &common.rdma.told[peer].stopped, common.wait.timeout_ns};
}

/// By one warp: its words, in the block's memory for them.
DEEP_EP_DEVICE const LowLatencyPosterWords& set_up_poster(const LowLatencyParams& common, LowLatencyChannel channel,
                                                          int peer, std::byte* words) {
  auto& mine = reinterpret_cast<LowLatencyPosterWords*>(words)[warp_index()];
  const RdmaPeerParams* pair = common.rdma.peers + static_cast<int>(channel) * common.num_ranks + peer;
  static_assert(sizeof(RdmaPeerParams) % sizeof(std::uint64_t) == 0);
  for (int i = lane_index(); i < static_cast<int>(sizeof(RdmaPeerParams) / sizeof(std::uint64_t)); i += kWarpSize) {
    reinterpret_cast<std::uint64_t*>(&mine.pair)[i] = load_stream(reinterpret_cast<const std::uint64_t*>(pair) + i);
  }
  if (lane_index() == 0) mine.wait = context_of_queue(common, peer);
  warp::sync();
  return mine;
}

/// Where a queue pair has failed: masks its rank, or ends the call. By one thread.
DEEP_EP_DEVICE void blame_queue(const LowLatencyParams& common, const RdmaQueuePair& queue) {
  if (masked(common, queue.peer)) return;
  const auto failure = static_cast<std::int32_t>(load_relaxed<Scope::gpu>(&queue.state->failure));
  if (common.mask == nullptr) {
    report_fault(common.wait, FaultKind::rdma_failed, Wanted::rdma_completion, queue.peer, failure, 0, 0);
  } else {
    // Nothing new where the failed wait has filled the record.
    write_record(common.masked[queue.peer], FaultKind::rdma_failed, Wanted::rdma_completion, queue.peer, failure, 0, 0);
    mask_rank(common, queue.peer, Wanted::rdma_completion, 0, 0);
  }
}

enum class StagedRow { awaited, staged, nothing };

/// One warp's view of one far rank during one kernel. All lanes make every call, with the same arguments unless it says
/// otherwise. Functions that return bool return false when the rank is to be left: it is masked, or the call is over.
template <LowLatencyKind kKind>
class LowLatencyPoster {
 public:
  /// `words`: of set_up_poster. `epoch`: of the call that this kernel sends, if it does.
  DEEP_EP_DEVICE LowLatencyPoster(const LowLatencyParams& common, const LowLatencyPosterWords& words,
                                  std::uint64_t epoch)
      : common_(common),
        words_(words),
        epoch_(epoch),
        queue_(words.pair, words.wait),
        found_posted_(queue_.posted()),
        told_progress_(told().progress[kKindIndex][epoch & 1]) {
    warp::sync();  // all have read what lane 0 will write
    if (common.mask != nullptr && lane_index() == 0) store_relaxed<Scope::gpu>(&told().stopped, 0);
    warp::sync();
  }

  /// Tells the peer up to which call this rank has received.
  DEEP_EP_DEVICE bool acknowledge(std::uint64_t received) {
    return tell(common_.window.acknowledged_at(kKind, common_.rank), told().acknowledged[kKindIndex], received);
  }
  /// Tells it that this rank has begun to send the call.
  DEEP_EP_DEVICE bool begin() { return tell(common_.window.begun_at(kKind, common_.rank), told().begun, epoch_); }
  /// Tells it that everything up to `place` of the call is there: see progress_value.
  DEEP_EP_DEVICE bool progress(int place) {
    const std::uint64_t value = progress_value(epoch_, place);
    const std::uint64_t step = value - told_progress_;
    told_progress_ = value;
    const std::size_t word = common_.window.progress_at(kKind, epoch_, common_.rank);
    const bool good = held(queue_.signal_add(word, step, lane_index() == 0));
    if (good && lane_index() == 0) told().progress[kKindIndex][epoch_ & 1] = value;
    return good;
  }

  /// Copies from the own heap into the peer's. Each lane for itself.
  DEEP_EP_DEVICE bool put(std::size_t to, std::size_t from, std::uint32_t bytes, bool wanted) {
    return held(queue_.put(to, from, bytes, wanted));
  }
  DEEP_EP_DEVICE void flush() { queue_.flush(); }

  /// Waits until the peer has received the call before the last, whose places this one takes: by `wait(word, call)` in
  /// one lane. What was posted is on its way meanwhile: two ranks may wait for each other.
  template <class Wait>
  DEEP_EP_DEVICE bool await_credit(Wait wait) {
    if (epoch_ <= 2) return true;
    const std::uint64_t* word = acknowledged_word(common_, kKind, peer());
    bool there = true;
    if (lane_index() == 0) there = load_acquire<Scope::system>(word) >= epoch_ - 2;
    if (!warp::all(there)) {
      flush();
      there = lane_index() != 0 || wait(word, epoch_ - 2);
    }
    const bool all = warp::all(there);
    warp::sync();  // what one lane acquired, the others may rely on only after this
    return all;
  }

  /// Posts up to 32 rows, a lane each (those with `mine`), in the order of the lanes, and never holds back one that is
  /// ready with all before it. `state()` says whether the lane's row is staged; `put_rows(posts)` puts those of the
  /// lanes with `posts`; `place` is what the lane's row is called in progress().
  template <class State, class PutRows>
  DEEP_EP_DEVICE bool post_rows(bool mine, int place, State state, PutRows put_rows) {
    std::uint32_t left = warp::ballot(mine);
    for (int spins = 1; left != 0;) {
      const bool waits = (left >> lane_index() & 1) != 0;
      const StagedRow row = waits ? state() : StagedRow::nothing;
      const std::uint32_t awaited = warp::ballot(row == StagedRow::awaited);
      const std::uint32_t now = awaited == 0 ? left : left & ((1u << lowest_bit(awaited)) - 1);
      if (now == 0) {
        pause(++spins);
        if (spins % 64 == 0 && leaves()) return false;
        continue;
      }
      const bool posts = (now >> lane_index() & 1) != 0 && row == StagedRow::staged;
      if (!put_rows(posts) || !progress(warp::max((now >> lane_index() & 1) != 0 ? place : 0))) return false;
      flush();
      left &= ~now;
      spins = 1;
    }
    return true;
  }

  /// Gives the queue pair back. Before, it sees the completions of what earlier kernels had posted: what these had
  /// staged may be written again by the next. Those of a rank that is masked by now may never come.
  DEEP_EP_DEVICE void close() {
    if (!leaves()) held(queue_.wait_for(found_posted_));
    held(queue_.close());
  }

 private:
  /// Adds to a word of the peer so that it becomes `value`; `told` is what it will be already.
  DEEP_EP_DEVICE bool tell(std::size_t word, std::uint64_t& told, std::uint64_t value) {
    const std::uint64_t before = warp::shuffle(lane_index() == 0 ? told : 0, 0);
    if (value <= before) return true;
    const bool good = held(queue_.signal_add(word, value - before, lane_index() == 0));
    if (good && lane_index() == 0) told = value;
    return good;
  }

  DEEP_EP_DEVICE bool leaves() const { return warp::any(aborted(common_.wait) || masked(common_, peer())); }
  DEEP_EP_DEVICE bool held(bool good) const {
    if (good) return true;
    if (lane_index() == 0) blame_queue(common_, words_.pair.queue);
    warp::sync();
    return false;
  }

  static constexpr int kKindIndex = static_cast<int>(kKind);
  DEEP_EP_DEVICE int peer() const { return words_.pair.queue.peer; }
  DEEP_EP_DEVICE LowLatencyTold& told() const { return common_.rdma.told[peer()]; }

  const LowLatencyParams& common_;
  const LowLatencyPosterWords& words_;
  std::uint64_t epoch_;
  rdma::RdmaPeer<WholeWarp> queue_;
  std::uint64_t found_posted_;
  std::uint64_t told_progress_;
};

}  // namespace deep_ep::device
