// The ranks of a low-latency call: how each is reached, where its rows and words lie and whether they are there, what
// becomes of a wait for a rank that does not come, and how posters get rows to far ranks.
//
// A rank is reached with stores over NVLink (near), through this rank's NIC (far), or through its NIC and one more rank
// (by rails). Near peers see tags and cells; a far one sees rows whole, once the word of its source's poster says how
// far they have come (by RDMA the pieces of a line come in any order, tag or not).
//
// By rails a row crosses the network once for each node, between ranks that have the same index in their nodes (of
// equally many consecutive ranks), and is handed on over NVLink.
//
//   one to many   sender -- NIC --> its rail in the other node, the relay -- NVLink --> each rank that wants the row
//   many to one   each rank with a part -- NVLink --> the receiver's rail there, the relay, adds -- NIC --> receiver
//
// A relay hands on within its own call: so either all ranks of a call go by rails or none does. In the receiver's
// window, rows of dispatch that are handed on take the place of their far source. In the relay's, rows of combine from
// a rank of its node take the place of the rank with the same index in the owner's node, which sends it none. Counts,
// selections and acknowledgements always go directly.
//
// A peer that is late is a fault that ends the call. If the buffer masks ranks, the control threads decide which rank
// is lost (csrc/control/), and calls go on without it: no wait masks a rank by itself. With masking, each rank waits
// for all others to begin a combine: what a masked rank writes when it wakes up must not be summed.
#pragma once

#include "kernels/common/row_copy.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/low_latency/params.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/rdma/port_channel.hpp"

namespace deep_ep::device::low_latency {

/// True for a rank that is left out: nothing is sent to it, nothing is expected of it.
DEEP_EP_DEVICE bool masked(const LowLatencyParams& common, int peer) {
  return common.mask != nullptr && load_relaxed<Scope::gpu>(common.mask + peer) != 0;
}

/// Tells the control thread of failed queue pairs. Looks at those to each rank in turn, whichever rank is waited for:
/// the poster of an earlier call may have ended before one failed, and the rank at its other end waits for what is
/// lost.
template <bool kRdma>
DEEP_EP_DEVICE void report_failures(const LowLatencyParams& common) {
  if (!kRdma) return;
  const std::uint32_t looks = fetch_add_relaxed<Scope::gpu>(&common.wait.control->failure_looks, 1u);
  const auto peer = static_cast<int>(looks % static_cast<std::uint32_t>(common.num_ranks));
  if (!common.is_far(peer)) return;
#pragma unroll 1
  for (int channel = 0; channel < low_latency_channels(common.lanes); ++channel) {
    const rdma::CompletionEntry& entry = *common.queue_pair(channel, peer).completion;
    const std::uint32_t opcode = rdma::tail_opcode(load_acquire<Scope::system>(&entry.tail));
    if (opcode == rdma::kCompletionOk || opcode == rdma::kCompletionNotYetWritten) continue;
    store_release<Scope::system>(common.wait.control->words->failed + peer,
                                 rdma::failure_in(entry, opcode).packed() + 1);
  }
}

/// Ends a wait if nothing comes from `peer` any more, or if it has lasted for too long: ends the call, or goes on,
/// where the peer is masked now.
template <bool kRdma>
DEEP_EP_DEVICE_CALL Lateness end_late_wait(const LowLatencyParams& common, int peer, Wanted wanted,
                                           std::uint64_t expected, std::uint64_t begin) {
  const Lateness found = is_late_wait(common.wait, peer, wanted, begin, [&] { report_failures<kRdma>(common); });
  if (found == Lateness::late && !masked(common, peer)) {
    const int timeouts = common.mask == nullptr ? 0 : kMostTimeouts;
    report_fault(common.wait, FaultKind::timeout, wanted, peer, timeouts, expected, 0);
  }
  return found;
}

/// One call of this rank, and the policy of its waits. `row_bytes`: of a row as it travels. `kRdma` false: no rank is
/// far.
template <LowLatencyKind kKind, bool kRdma>
struct RankCall {
  using Mailbox = LowLatencyMailbox;
  static constexpr LowLatencyKind kCall = kKind;
  static constexpr int kIndex = static_cast<int>(kKind);
  const LowLatencyParams& common;
  std::uint64_t epoch;
  std::uint32_t row_bytes;

  DEEP_EP_DEVICE bool gives_up(int peer) const { return aborted(common.wait) || masked(common, peer); }
  DEEP_EP_DEVICE bool called_off(const Awaited& awaited) const { return gives_up(awaited.peer); }
  DEEP_EP_DEVICE bool ends(const Awaited& awaited, Poll& poll) const {
    return may_be_late(poll.begin) &&
           poll.decides(awaited.peer,
                        end_late_wait<kRdma>(common, awaited.peer, awaited.wanted, awaited.expected, poll.begin));
  }

  // ---- How each rank is reached ----

  DEEP_EP_DEVICE bool is_far(int rank) const { return kRdma && common.is_far(rank); }
  DEEP_EP_DEVICE bool uses_rails() const { return kRdma && common.rail_width != 0; }

  /// In blocks that post, each warp to one far rank over one lane: the number of the first warp's among these. The
  /// first lanes of all ranks come first.
  DEEP_EP_DEVICE int first_posted() const { return (block_index() - common.working_blocks) * block_warps(); }
  /// The far rank with so many others below it.
  DEEP_EP_DEVICE int far_rank(int number) const {
    int word = 0;
    while (number >= count_bits(common.far_ranks[word])) number -= count_bits(common.far_ranks[word++]);
    std::uint32_t bits = common.far_ranks[word];
    for (; number != 0; --number) bits &= bits - 1;
    return word * 32 + lowest_bit(bits);
  }
  DEEP_EP_DEVICE int lane(int number) const { return number & (common.lanes - 1); }

  // The others are for calls that go by rails.

  DEEP_EP_DEVICE int num_nodes() const { return uses_rails() ? common.num_ranks / common.rail_width : 1; }
  DEEP_EP_DEVICE int node(int rank) const { return rank / common.rail_width; }
  DEEP_EP_DEVICE int own_node() const { return node(common.rank); }
  DEEP_EP_DEVICE bool in_own_node(int rank) const { return node(rank) == own_node(); }
  /// The rank of `node` that exchanges rows with `other`: it has the same index in its node.
  DEEP_EP_DEVICE int rail(int node, int other) const { return node * common.rail_width + other % common.rail_width; }
  /// Is this rank the one of its node that exchanges rows with `far_rank`? Without rails no rank is.
  DEEP_EP_DEVICE bool is_relay(int far_rank) const { return uses_rails() && rail(own_node(), far_rank) == common.rank; }

  // ---- Words: a call takes the places of the call before the last, once the peer has acknowledged that one ----

  /// What `peer` has told this rank: see LowLatencyMailbox.
  DEEP_EP_DEVICE const std::uint64_t* word_of(int peer, int index) const {
    return common.window.word(kKind, peer, index).in(common.local);
  }
  /// Where this rank tells a peer.
  DEEP_EP_DEVICE Place<std::uint64_t> own_word(int index) const {
    return common.window.word(kKind, common.rank, index);
  }
  /// By one thread: tells a near rank, releasing what the thread wrote before.
  DEEP_EP_DEVICE void tell(int peer, int index, std::uint64_t value) const {
    store_release<Scope::system>(own_word(index).in(common.heaps[peer]), value);
  }
  /// By the owner of a queue pair to a far rank: tells it, behind everything posted there before.
  template <class Group>
  DEEP_EP_DEVICE bool tell(rdma::PortChannel<Group>& queue, int peer, int index, std::uint64_t value) const {
    return queue.signal(own_word(index), *common.window.told(kKind, peer, index).in(common.local), value);
  }
  /// By a whole warp: tells the near ranks up to which call this one has received, ordered after all reads of that
  /// call; and where it `begins` that it has begun to send this one.
  DEEP_EP_DEVICE void acknowledge_all(std::uint64_t received, bool begins = false) const {
    warp::each(common.num_ranks, [&](int peer) {
      if (masked(common, peer) || is_far(peer)) return;
      tell(peer, Mailbox::kAcknowledged, received);
      if (begins) tell(peer, Mailbox::progress(epoch, 0), Progress::at(epoch));
    });
  }
  /// Up to which call `peer` has received, acquired: what is written afterwards follows its reads of that call.
  DEEP_EP_DEVICE std::uint64_t load_acknowledged(int peer) const {
    return load_acquire<Scope::system>(word_of(peer, Mailbox::kAcknowledged));
  }
  DEEP_EP_DEVICE bool has_room(std::uint64_t seen) const { return epoch <= 2 || seen >= epoch - 2; }
  /// By one thread: waits for room, acquiring, if `seen` does not say that there is. False: the peer is to be left out,
  /// or the call is over.
  DEEP_EP_DEVICE bool await_room(int peer, std::uint64_t seen) const {
    constexpr Wanted kWanted =
        kKind == LowLatencyKind::dispatch ? Wanted::low_latency_dispatch_credit : Wanted::low_latency_combine_credit;
    return has_room(seen) || wait_signal(*this, word_of(peer, Mailbox::kAcknowledged), {peer, kWanted, epoch - 2});
  }
  /// May what `source` sends before its rows be read? Of a far rank once its word says so, which acquires it.
  DEEP_EP_DEVICE bool has_begun(int source) const {
    return !is_far(source) ||
           load_acquire<Scope::system>(word_of(source, Mailbox::progress(epoch, 0))) >= Progress::at(epoch);
  }
  /// Waits until it has come to `place` of the call, acquiring what was posted up to there by the lane of that place.
  template <class Group = OneThread>
  DEEP_EP_DEVICE bool await_progress(int source, int place, Wanted wanted) const {
    const std::uint64_t* const word = word_of(source, Mailbox::progress(epoch, place == 0 ? 0 : lane(place - 1)));
    return wait_until<Group>(*this, {source, wanted, epoch}, [&](const Poll&) {
      return !Group::any(load_acquire<Scope::system>(word) < Progress::at(epoch, static_cast<std::uint32_t>(place)));
    });
  }

  // ---- Rows ----

  /// Row `slot` of `source` in the window of the rank that gets it.
  DEEP_EP_DEVICE Place<std::byte> row(int source, int slot) const {
    return common.window.rows[kIndex].at(epoch, source, slot, row_bytes);
  }
  /// The place from which a poster sends row `index` to rank `to`, or to all peers: see LowLatencyWindow.
  DEEP_EP_DEVICE Place<std::byte> staged_row(int to, int index) const {
    return common.window.staged_rows.at(epoch, to, index, row_bytes);
  }
  /// By a whole warp: its part of that row is there, or of no use to the peer. Releases it to the poster.
  DEEP_EP_DEVICE void hand_over(int to, int index, int warp = 0) const {
    warp::sync();
    // The poster, a warp of this GPU, releases the row to the NIC.
    if (lane_index() == 0) store_release<Scope::gpu>(staged_flag(to, index, warp), epoch);
  }
  /// Have the first `warps` warps handed over their parts? Acquires them.
  DEEP_EP_DEVICE bool is_staged(int to, int index, int warps) const {
    for (int warp = 0; warp < warps; ++warp) {
      if (load_relaxed<Scope::gpu>(staged_flag(to, index, warp)) != epoch) return false;
    }
    fence<Scope::gpu>();
    return true;
  }
  /// Row `slot` that this rank hands on, or its own part of it: see LowLatencyWindow.
  DEEP_EP_DEVICE Place<std::byte> relayed_row(int node, int slot) const {
    return common.window.relayed[kIndex].at(epoch, node, slot, row_bytes);
  }
  /// At a far rank: row `slot` that this rank sends to it, or by rails in a dispatch to all of its node.
  DEEP_EP_DEVICE Place<std::byte> posted_row(int slot) const {
    return kKind == LowLatencyKind::dispatch && uses_rails() ? relayed_row(own_node(), slot) : row(common.rank, slot);
  }

 private:
  DEEP_EP_DEVICE std::uint64_t* staged_flag(int to, int index, int warp) const {
    return common.window.ready.at(epoch, to, index * LowLatencyWindow::kMostWarpsPerRow + warp).in(common.local);
  }
};

template <bool kRdma>
using DispatchCall = RankCall<LowLatencyKind::dispatch, kRdma>;

// Ranks may be masked while a call runs. Then some blocks have received with a rank and others without it, and the last
// block to finish receives again, alone, from those that are left. All that these sent is there.

/// One thread of a block, of a warp that has less to do than the first and the last one, if there are so many.
DEEP_EP_DEVICE bool is_middle_thread() { return thread_index() == block_warps() / 2 * kWarpSize; }

/// A block's knowledge of its call, in shared memory.
struct CallWords {
  struct Epochs {
    std::uint64_t send, receive;
  } epochs;                   ///< of the call that the kernel sends, and of the one that it receives
  std::uint64_t seen;         ///< the version of the masks when the block began to receive
  std::int32_t destinations;  ///< of dispatch: of the current token
  std::uint32_t meaning;      ///< of combine: what ranks mean by it: its shape, and the dispatch that the handle is of

  /// By one thread for its block, so that not all warps of the GPU meet at these words; before the block looks at any
  /// mask.
  DEEP_EP_DEVICE void read(const LowLatencyParams& common, LowLatencyKind kind) {
    const LowLatencyCounters& counters = common.counters(kind);
    const auto next = [](const std::uint64_t& counted) {
      return Progress::call_of(load_relaxed<Scope::gpu>(&counted)) + 1;
    };
    epochs = {next(counters.sent), next(counters.received)};
    seen = common.mask == nullptr ? 0 : load_acquire<Scope::gpu>(&common.wait.control->version);
  }
};

/// Shared memory of a block that both kinds of calls have.
struct CallShared {
  Carver carver;
  int num_ranks;
  int poster_warps;  ///< 0 where no rank is far
  CallWords* words = carver.take<CallWords>();
  /// Sending: what each rank had acknowledged when the block began.
  std::uint64_t* acknowledged = carver.take<std::uint64_t>(num_ranks);
  RdmaQueuePair* posters = carver.take<RdmaQueuePair>(poster_warps, kLine);

  /// By all threads of the block: learns which call this is, each warp waiting for its own loads alone; syncs; and
  /// counts the block's part.
  template <LowLatencyKind kKind>
  DEEP_EP_DEVICE void begin(const LowLatencyParams& common, LowLatencyPhase phase) const {
    if (thread_index() == block_threads() - 1) words->read(common, kKind);
    block::each(phase.sends ? num_ranks : 0, [&](int rank) {
      acknowledged[rank] = RankCall<kKind, false>{common, 0, 0}.load_acknowledged(rank);
    });
    block::sync();
    if (is_middle_thread()) common.counters(kKind).add_part(phase);
  }
};

/// By every thread of the blocks that receive: `receive(again)`, until it has been the same ranks in all of the call.
/// True in the block that finishes last, with masking. kMasks false: no call of this kernel has masks.
template <bool kMasks, class Receive>
DEEP_EP_DEVICE bool receive_with_masks(const LowLatencyParams& common, LowLatencyKind kind, CallWords& words,
                                       Receive receive) {
  constexpr int kVersionBits = 48;  // of the sum of versions; above it are the blocks that it is of
#pragma unroll 1
  for (bool again = false;; again = true) {
    receive(again);
    if (!kMasks || common.mask == nullptr) return false;
    block::sync();
    bool last = true, same = true;  // have all blocks finished, with the same masks?
    if (thread_index() == 0) {
      std::uint64_t& finished = common.counters(kind).finished;
      const auto blocks = static_cast<std::uint64_t>(common.working_blocks);
      const std::uint64_t own = (std::uint64_t{1} << kVersionBits) + words.seen;
      const std::uint64_t all = again ? own * blocks : fetch_add_acq_rel<Scope::gpu>(&finished, own) + own;
      words.seen = load_acquire<Scope::gpu>(&common.wait.control->version);
      last = all >> kVersionBits == blocks;
      same = all == ((std::uint64_t{1} << kVersionBits) + words.seen) * blocks;
      if (last) store_relaxed<Scope::gpu>(&finished, std::uint64_t{0});
    }
    last = block::all(last);
    if (block::all(same) || !last) return last;
  }
}

// How a call's rows and words get to a far rank: one warp, the only owner of the queue pair of its lane, posts what
// other blocks have staged, in the order of slots (dispatch) or tokens (combine). It adds to one word how far it has
// come, which the receiver waits for: see LowLatencyMailbox::progress().
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
// A rank that is masked is not waited for, so a NIC may still read for it what is written again, or what was not staged
// in this call. It has to be a NIC that neither finished nor gave up within two calls; the rank finds other tags in
// those rows, and waits for ours in vain. Only a line that is read while it is written could have our tag and other
// bytes.

/// One lane to one far rank in one call, by a whole warp. Functions that return bool return false when the rank is to
/// be left: it is given up, or the call is over.
template <class Call>
class CallPoster {
 public:
  rdma::PortChannel<WholeWarp> queue;
  const Call& call;
  const int peer, lane;  ///< what precedes all rows, and words that no row waits for, go by the first lane

  DEEP_EP_DEVICE CallPoster(const Call& of_call, int to, int over, const RdmaQueuePair& pair)
      : queue(pair, of_call.common.posts), call(of_call), peer(to), lane(over), found_posted_(queue.posted()) {}

  /// Waits for room at the peer, acquiring. What was posted is on its way meanwhile: two ranks may wait for each other.
  DEEP_EP_DEVICE bool await_room() {
    const std::uint64_t seen = call.load_acknowledged(peer);
    if (!warp::all(call.has_room(seen))) queue.flush();
    return warp::agree(lane_index() != 0 || call.await_room(peer, seen));
  }

  /// Posts the rows that go by this lane of those that are staged for `to` by so many warps, in the order of their
  /// numbers: `place_of(number)`, by the whole warp, a number below `count` each, is the position of which the peer is
  /// told; 0: it does not get the row. `bytes_of(number)` returns the bytes of a staged row. Never holds back one that
  /// is ready with all before it. An addition may wait for the writes before it, a round trip: so the peer is told
  /// again only when what it was told before has arrived. Call tell_rest() behind the last rows.
  template <class PlaceOf, class BytesOf>
  DEEP_EP_DEVICE void post_rows(int count, int to, int warps, PlaceOf place_of, BytesOf bytes_of) {
    for (int begin = 0; begin < count; begin += kWarpSize) {
      const int number = begin + lane_index();
      const int place = place_of(number < count ? number : -1);
      std::uint32_t left = warp::ballot(place != 0 && call.lane(place - 1) == lane);
      while (left != 0) {
        std::uint32_t now = 0;
        const auto some_ready = [&](Poll&) {
          const bool awaited = (left >> lane_index() & 1) != 0 && !call.is_staged(to, number, warps);
          const std::uint32_t all = warp::ballot(awaited);
          now = all == 0 ? left : left & ((1u << lowest_bit(all)) - 1);
          return now != 0 || may_tell();
        };
        if (!poll_until(some_ready, [&](const Poll&) { return leaves(); })) return;
        if (now != 0) {
          const bool mine_now = (now >> lane_index() & 1) != 0;
          const Place<std::byte> at_peer = call.posted_row(place - 1);
          const std::uint32_t bytes = mine_now ? bytes_of(number) : 0;
          if (!queue.put(at_peer.offset, call.staged_row(to, number).offset, bytes, mine_now)) return;
          untold_ = warp::max(mine_now ? place : 0);
          left &= ~now;
        }
        if (!may_tell()) {
          queue.flush();
        } else if (!tell_rest()) {
          return;
        }
      }
    }
  }
  /// Tells the peer of what it has not been told of: rows, or on `request` that what precedes them is there.
  DEEP_EP_DEVICE bool tell_rest(bool request = false) {
    if (untold_ == 0 && !request) return true;
    if (!call.tell(queue, peer, LowLatencyMailbox::progress(call.epoch, lane),
                   Progress::at(call.epoch, static_cast<std::uint32_t>(untold_)))) {
      return false;
    }
    queue.flush();
    if (untold_ != 0) last_told_ = queue.posted();
    untold_ = 0;
    return true;
  }
  /// Waits for the completions of what earlier kernels had posted (those of a rank that has been given up may never
  /// come), as the next kernel may write again what these had staged. Then gives the queue pair back.
  DEEP_EP_DEVICE void close() {
    if (!leaves()) queue.wait_for(found_posted_);
    queue.close();
  }

 private:
  DEEP_EP_DEVICE bool may_tell() { return untold_ != 0 && queue.reached(last_told_); }
  DEEP_EP_DEVICE bool leaves() const { return warp::any(call.gives_up(peer)); }

  std::uint64_t found_posted_;
  std::uint64_t last_told_ = 0;  ///< ticket of the last progress
  int untold_ = 0;               ///< place up to which rows are posted; 0: the peer has been told of all
};

/// By a whole warp of a block that posts: serves one rank, or one lane to it. `post(poster)` posts what the peer gets
/// in the call that is sent.
template <class Call, class Post>
DEEP_EP_DEVICE void serve_lane(const Call& call, const CallShared& shared, bool sends, Post post) {
  const LowLatencyParams& common = call.common;
  const int index = call.first_posted() + warp_index();
  if (index >= common.num_far * common.lanes) return;
  const int peer = call.far_rank(index % common.num_far), lane = index / common.num_far;
  if (warp::any(masked(common, peer))) return;
  RdmaQueuePair& own = shared.posters[warp_index()];  // which every entry needs
  copy_words(&own, &common.queue_pair(channel_of(Call::kCall, lane), peer), sizeof own);
  warp::sync();
  CallPoster poster(call, peer, lane, own);
  const bool on =
      lane != 0 || call.tell(poster.queue, peer, LowLatencyMailbox::kAcknowledged, shared.words->epochs.receive - 1);
  if (sends && on && poster.await_room()) post(poster);
  poster.close();
}

}  // namespace deep_ep::device::low_latency
