// How ranks hear of accusations where some are far: each tells each other one. See watch.hpp.
//
// Words in the heap of the rank that reads them, of one writer each (LowLatencyNews): a near rank stores, a far one
// adds, over a queue pair that watchers alone use, to words that were zero. So the memory of a rank that is gone is not
// needed, and no operation that NIC and GPU would have to share.
//
// Watchers of one rank, in kernels that run at the same time, share these queue pairs and what is written down about
// whom has been told what (LowLatencyTold). So one of them looks at a time.
#pragma once

#include "kernels/low_latency/transport/accusations.hpp"
#include "kernels/low_latency/transport/poster.hpp"

namespace deep_ep::device::low_latency {

/// Of a kernel in which nobody owes rows.
struct NoDebts {
  DEEP_EP_DEVICE Awaited rows_of(int peer) const { return {peer, Wanted::nothing, 0}; }
};

/// The members are those of Board. `Debts` knows what far peers owe: they cannot show what they have sent, but this
/// rank has words of theirs that say what has come.
template <class Debts>
class News {
 public:
  static constexpr bool kTellsEnd = true;

  DEEP_EP_DEVICE News(const LowLatencyParams& params, const Debts& debts) : common(params), debts_(debts) {}

  DEEP_EP_DEVICE bool begin() {
    source_ = 0;
    return compare_exchange<Scope::gpu>(&common.state->looking, 0, 1) == 0;
  }
  DEEP_EP_DEVICE void end() { store_release<Scope::gpu>(&common.state->looking, std::uint64_t{0}); }

  /// One beat at a time is on its way to a rank: whoever is not reached need not have many.
  DEEP_EP_DEVICE void show() {
    const LowLatencyWindow& window = common.window;
#pragma unroll 1
    for (int peer = 0; peer < common.num_ranks; ++peer) {
      if (!is_far(peer)) continue;
      if (!masked(common, peer)) {
        post(peer, [&](auto& queue) {
          return !queue.reached(queue.posted()) || queue.signal_add(window.far_beat(common.rank).offset, 1);
        });
      } else {
        stop_posting_to(peer);
      }
    }
  }

  /// The call is over. Whoever still waits for completions would do so for as long as waits may take.
  DEEP_EP_DEVICE void stop_posting() {
#pragma unroll 1
    for (int peer = 0; peer < common.num_ranks; ++peer) {
      if (is_far(peer)) stop_posting_to(peer);
    }
  }

  /// Of a far peer: whatever comes from it.
  DEEP_EP_DEVICE std::uint64_t sign_of(int peer) const {
    if (!is_far(peer)) return load_relaxed<Scope::system>(&signs_of(common, peer).beat);
    const LowLatencyWindow& window = common.window;
    std::uint64_t sum = own(window.far_beat(peer)) + own(window.barrier(peer));
#pragma unroll 1
    for (int number = 0; number < static_cast<int>(kLowLatencyKinds); ++number) {
      const auto kind = static_cast<LowLatencyKind>(number);
      sum += own(window.acknowledged(kind, peer)) + own(window.begun(kind, peer));
#pragma unroll 1
      for (int lane = 0; lane < common.lanes; ++lane) {
        sum += own(window.progress(kind, 0, peer, lane)) + own(window.progress(kind, 1, peer, lane));
      }
    }
    return sum;
  }
  DEEP_EP_DEVICE Awaited rows_of(const WatchedCall& call, int peer) const {
    return is_far(peer) ? debts_.rows_of(peer) : rows_of_near(common, call, peer);
  }
  /// A queue pair to it has failed: one of watchers, or one over which rows go. Then a poster has masked it, or will
  /// find that out in a later call.
  DEEP_EP_DEVICE bool is_unreachable(int peer) const {
    const LowLatencyTold& told = common.told[peer];
    if (!is_far(peer) || load_relaxed<Scope::gpu>(&told.given_up) != 0) return false;
    if (masked(common, peer)) {
      return load_relaxed<Scope::gpu>(&told.by_hand) == 0 && !masked_by_own_deadline(common, peer);
    }
    if (load_relaxed<Scope::gpu>(&told.unreachable) != 0) return true;
#pragma unroll 1
    for (int channel = 0; channel < watch_channel(common.lanes); ++channel) {
      if (has_failed(queue_pair(common, channel, peer).queue)) return true;
    }
    return false;
  }

  DEEP_EP_DEVICE bool next(Accusation& found) {
#pragma unroll 1
    for (; source_ < common.num_ranks; ++source_) {
      if (source_ == common.rank) continue;
      // Whom the program has masked hears of nobody, and accuses everybody.
      const bool counts = load_relaxed<Scope::gpu>(&common.told[source_].by_hand) == 0;
#pragma unroll 1
      for (std::uint64_t word = first_of(source_); word != 0; word = first_of(source_)) {
        found = Accusation::unpack(word);
        if (counts) return true;
        done();
      }
    }
    source_ = 0;
    return false;
  }
  DEEP_EP_DEVICE void done() {
    std::uint32_t& read = common.told[source_].read;
    store_relaxed<Scope::gpu>(&read, load_relaxed<Scope::gpu>(&read) + 1);
  }

  DEEP_EP_DEVICE bool is_new(const Accusation& found) const {
    return load_relaxed<Scope::gpu>(&common.told[found.accused].given_up) == 0;
  }
  /// To all that are not masked, then to the one that is accused: it would tell nobody. False: somebody has been told
  /// too many.
  DEEP_EP_DEVICE bool pass_on(const Accusation& found) {
    bool good = true;
#pragma unroll 1
    for (int peer = 0; peer < common.num_ranks; ++peer) {
      if (peer != common.rank && peer != found.accused && !masked(common, peer)) good = tell(peer, found) && good;
    }
    if (found.accused != common.rank) good = tell(found.accused, found) && good;
    store_relaxed<Scope::gpu>(&common.told[found.accused].given_up, 1);
    has_told_ = true;
    return good;
  }
  template <class Watcher>
  DEEP_EP_DEVICE bool accuse(const Accusation& mine, Watcher& watcher) {
    const bool told = pass_on(mine);
    watcher.mask_accused(mine);
    return told;
  }

  /// This rank has ended a call, as ranks disagree about it, and makes no other one. What others saw of it may look as
  /// if it had sent all, so they need not find out.
  DEEP_EP_DEVICE void tell_end() {
    if (load_relaxed<Scope::gpu>(&common.told[common.rank].given_up) != 0) return;
    pass_on({common.rank, common.rank, Wanted::nothing});
  }

  DEEP_EP_DEVICE void forgive(int peer) {
    LowLatencyTold& told = common.told[peer];
    store_relaxed<Scope::gpu>(&told.given_up, 0);
    store_relaxed<Scope::gpu>(&told.by_hand, 0);
    store_relaxed<Scope::gpu>(&told.unreachable, 0);
  }
  DEEP_EP_DEVICE void note_by_hand(int peer) { store_relaxed<Scope::gpu>(&common.told[peer].by_hand, 1); }

  DEEP_EP_DEVICE bool has_told() const { return has_told_; }
  /// Waits for what has been told to arrive, but not for long: programs may unmask when all calls have ended, and what
  /// was said before must not come after that.
  DEEP_EP_DEVICE void settle() {
    const std::uint64_t begin = now_ns();
    const std::uint64_t most = common.state->watch.timeout_ns / 4;
#pragma unroll 1
    for (int peer = 0; peer < common.num_ranks; ++peer) {
      if (!is_far(peer) || masked(common, peer)) continue;
      post(peer, [&](auto& queue) {
        poll_until([&](const Poll&) { return queue.reached(queue.posted()); },
                   [&](const Poll&) { return now_ns() - begin > most; });
        return true;
      });
    }
    has_told_ = false;
  }

  /// Tells far ranks how far this one is with the end of its buffer: more than before by so much.
  DEEP_EP_DEVICE void tell_ending(std::uint64_t more) {
#pragma unroll 1
    for (int peer = 0; peer < common.num_ranks; ++peer) {
      if (!is_far(peer)) continue;
      post(peer, [&](auto& queue) { return queue.signal_add(common.window.far_ending(common.rank).offset, more); });
    }
    settle();
  }

 private:
  DEEP_EP_DEVICE bool is_far(int peer) const { return Reach<true>{common}.is_far(peer); }
  DEEP_EP_DEVICE std::uint64_t own(const Place<std::uint64_t>& place) const {
    return load_acquire<Scope::system>(place.in(common.local));
  }

  /// The first word of a rank that has not been acted upon; 0: there is none.
  DEEP_EP_DEVICE std::uint64_t first_of(int source) const {
    const std::uint32_t index = load_relaxed<Scope::gpu>(&common.told[source].read);
    return index == kMostAccusations ? 0 : own(common.window.said(source, index));
  }

  /// By somebody who does not own it.
  DEEP_EP_DEVICE static bool has_failed(const RdmaQueuePair& pair) {
    const std::uint32_t opcode = device::rdma::tail_opcode(load_acquire<Scope::system>(&pair.completion->tail));
    return opcode != device::rdma::kCompletionOk && opcode != device::rdma::kCompletionNotYetWritten;
  }

  /// Over the queue pair of watchers to a far peer: `work(queue)`, which returns false if it fails.
  template <class Work>
  DEEP_EP_DEVICE void post(int peer, Work work) const {
    LowLatencyTold& told = common.told[peer];
    const WaitContext wait{common.masked + peer, &told.unreachable, common.state->watch.timeout_ns};
    rdma::PortChannel<OneThread> queue(queue_pair(common, watch_channel(common.lanes), peer), wait);
    const bool good = work(queue);
    if (!queue.close() || !good) store_relaxed<Scope::gpu>(&told.unreachable, std::uint64_t{1});
  }

  /// False: the peer's list is full.
  DEEP_EP_DEVICE bool tell(int peer, const Accusation& found) const {
    std::uint32_t& said = common.told[peer].said;
    const std::uint32_t index = load_relaxed<Scope::gpu>(&said);
    if (index == kMostAccusations) return false;
    const Place<std::uint64_t> place = common.window.said(common.rank, index);
    bool good = true;
    if (is_far(peer)) {
      post(peer, [&](auto& queue) { return good = queue.signal_add(place.offset, found.packed()); });
    } else {
      store_release<Scope::system>(place.in(common.heaps[peer]), found.packed());
    }
    // A gap would end the list for its reader. (Whom nothing reaches is accused for that.)
    if (good) store_relaxed<Scope::gpu>(&said, index + 1);
    return true;
  }

  /// Ends waits for the completions of the queue pairs to a peer, which have no deadline that anybody would wait for.
  DEEP_EP_DEVICE void stop_posting_to(int peer) const {
#pragma unroll 1
    for (int lane = 0; lane < common.lanes; ++lane) {
      store_relaxed<Scope::gpu>(&common.told[peer].stopped[lane], std::uint64_t{1});
    }
  }

  const LowLatencyParams& common;
  Debts debts_;
  int source_ = 0;
  bool has_told_ = false;
};

}  // namespace deep_ep::device::low_latency
