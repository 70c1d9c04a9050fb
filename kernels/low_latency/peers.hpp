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

/// Consecutive ranks.
struct RankRange {
  int first, count;
};

/// What a warp posts to.
struct PostedLane {
  int rank, lane;
};

/// How each rank is reached. `kRdma` false: no rank is far.
template <bool kRdma>
struct Topology {
  const LowLatencyParams& common;

  /// A far rank is not mapped here, and does not map this one.
  DEEP_EP_DEVICE bool is_far(int rank) const {
    return kRdma && (common.far_ranks[static_cast<unsigned>(rank) / 32] >> static_cast<unsigned>(rank) % 32 & 1) != 0;
  }
  DEEP_EP_DEVICE bool uses_rails() const { return kRdma && common.rail_width != 0; }

  /// Does this block post, and nothing else?
  DEEP_EP_DEVICE bool is_poster() const { return kRdma && block_index() >= common.working_blocks; }
  /// In blocks that post: the far rank that this warp serves, or -1, and over which lane. The first lanes of all ranks
  /// come first.
  DEEP_EP_DEVICE PostedLane posted_lane() const {
    const int index = first_posted() + warp_index();
    if (index >= common.num_far * common.lanes) return {-1, 0};
    return {far_rank(index % common.num_far), index / common.num_far};
  }
  DEEP_EP_DEVICE bool posts_first_lanes() const { return first_posted() < common.num_far; }
  /// The lane that row `number` takes.
  DEEP_EP_DEVICE int lane(int number) const { return number & (common.lanes - 1); }

  // The others are for calls that go by rails.

  DEEP_EP_DEVICE int num_nodes() const { return uses_rails() ? common.num_ranks / common.rail_width : 1; }
  DEEP_EP_DEVICE int node(int rank) const { return rank / common.rail_width; }
  DEEP_EP_DEVICE int own_node() const { return node(common.rank); }
  DEEP_EP_DEVICE bool in_own_node(int rank) const { return node(rank) == own_node(); }
  /// The rank of `node` that this rank exchanges rows with.
  DEEP_EP_DEVICE int rail(int node) const { return node * common.rail_width + common.rank % common.rail_width; }
  /// The rank of this node that exchanges rows with `far_rank`.
  DEEP_EP_DEVICE int relay(int far_rank) const { return own_node() * common.rail_width + far_rank % common.rail_width; }
  /// Is this rank that one? Without rails no rank is.
  DEEP_EP_DEVICE bool is_relay(int far_rank) const { return uses_rails() && relay(far_rank) == common.rank; }
  /// The rank whose row of combine has the part of `rank`: by rails, for another node, this rank's rail there.
  DEEP_EP_DEVICE int sender(int rank) const {
    return uses_rails() && rank >= 0 && !in_own_node(rank) ? rail(node(rank)) : rank;
  }
  /// The ranks that get this rank's rows of dispatch through far rank `peer`: without rails that one alone.
  DEEP_EP_DEVICE RankRange receivers(int peer) const {
    if (!uses_rails()) return {peer, 1};
    return {node(peer) * common.rail_width, is_relay(peer) ? static_cast<int>(common.rail_width) : 0};
  }

 private:
  DEEP_EP_DEVICE int first_posted() const { return (block_index() - common.working_blocks) * block_warps(); }
  /// The far rank with so many others below it.
  DEEP_EP_DEVICE int far_rank(int number) const {
    int word = 0;
    while (number >= count_bits(common.far_ranks[word])) number -= count_bits(common.far_ranks[word++]);
    std::uint32_t bits = common.far_ranks[word];
    for (; number != 0; --number) bits &= bits - 1;
    return word * 32 + lowest_bit(bits);
  }
};

/// Tells the control thread of failed queue pairs. Looks at those to each rank in turn, whichever rank is waited for:
/// the poster of an earlier call may have ended before one failed, and the rank at its other end waits for what is
/// lost.
template <bool kRdma>
struct FailureLook {
  const LowLatencyParams& common;

  DEEP_EP_DEVICE void operator()() const {
    if (!kRdma) return;
    const std::uint32_t looks = fetch_add_relaxed<Scope::gpu>(&common.wait.control->failure_looks, 1u);
    const auto peer = static_cast<int>(looks % static_cast<std::uint32_t>(common.num_ranks));
    if (!Topology<kRdma>{common}.is_far(peer)) return;
#pragma unroll 1
    for (int channel = 0; channel < low_latency_channels(common.lanes); ++channel) {
      const rdma::CompletionEntry& entry = *common.queue_pair(channel, peer).queue.completion;
      const std::uint32_t opcode = rdma::tail_opcode(load_acquire<Scope::system>(&entry.tail));
      if (opcode == rdma::kCompletionOk || opcode == rdma::kCompletionNotYetWritten) continue;
      store_release<Scope::system>(common.wait.control->words->failed + peer,
                                   rdma::failure_in(entry, opcode).packed() + 1);
    }
  }
};

/// Ends a combine: `peer` means another one; or selects what was not dispatched (`field` 1), or this rank does (2). The
/// control thread tells the others.
DEEP_EP_DEVICE void refuse_call(const LowLatencyParams& common, int peer, int field, std::uint64_t ours,
                                std::uint64_t theirs) {
  report_fault(common.wait, FaultKind::mismatch, Wanted::low_latency_combine_selection, peer, field, ours, theirs);
}

/// Ends a wait if nothing comes from `peer` any more, or if it has lasted for too long: ends the call, or goes on,
/// where the peer is masked now.
template <bool kRdma>
DEEP_EP_DEVICE_CALL bool end_late_wait(const LowLatencyParams& common, int peer, Wanted wanted, std::uint64_t expected,
                                       std::uint64_t begin) {
  if (!is_late_wait(common.wait, peer, wanted, begin, FailureLook<kRdma>{common})) return false;
  if (!masked(common, peer)) {
    const int timeouts = common.mask == nullptr ? 0 : kMostTimeouts;
    report_fault(common.wait, FaultKind::timeout, wanted, peer, timeouts, expected, 0);
  }
  return true;
}

/// The policy of waits, and of failures of queue pairs.
template <bool kRdma>
struct MaskOrEnd {
  const LowLatencyParams& common;

  DEEP_EP_DEVICE bool gives_up(int peer) const { return aborted(common.wait) || masked(common, peer); }
  DEEP_EP_DEVICE bool called_off(const Awaited& awaited) const { return gives_up(awaited.peer); }
  DEEP_EP_DEVICE bool ends(const Awaited& awaited, std::uint64_t begin, std::uint64_t = 0) const {
    return may_be_late(begin) && end_late_wait<kRdma>(common, awaited.peer, awaited.wanted, awaited.expected, begin);
  }
  /// Ends the call. With masking the control thread knows that the queue pair has failed: its verdict comes.
  DEEP_EP_DEVICE void blame_queue(const RdmaQueuePair& queue) const {
    if (common.mask != nullptr || gives_up(queue.peer)) return;
    const auto failure = static_cast<std::int32_t>(load_relaxed<Scope::gpu>(&queue.state->failure));
    report_fault(common.wait, FaultKind::rdma_failed, Wanted::rdma_completion, queue.peer, failure, 0, 0);
  }
};

/// One call of this rank. `row_bytes`: of a row as it travels.
template <LowLatencyKind kKind, bool kRdma>
struct RankCall : Topology<kRdma> {
  static constexpr LowLatencyKind kCall = kKind;
  using Base = Topology<kRdma>;
  using Base::common, Base::is_far, Base::lane, Base::node, Base::uses_rails, Base::relay, Base::is_relay;
  std::uint64_t epoch;
  std::uint32_t row_bytes;

  DEEP_EP_DEVICE RankCall(const LowLatencyParams& params, std::uint64_t number, std::uint32_t bytes)
      : Base{params}, epoch(number), row_bytes(bytes) {}

  DEEP_EP_DEVICE MaskOrEnd<kRdma> policy() const { return {common}; }

  // ---- Room: a call takes the places of the call before the last ----

  /// By a whole warp: tells the near ranks up to which call this one has received, ordered after all reads of that
  /// call; and where it `begins` that it has begun to send this one, releasing what the thread wrote before.
  DEEP_EP_DEVICE void acknowledge_all(std::uint64_t received, bool begins = false) const {
    warp::each(common.num_ranks, [&](int peer) {
      if (masked(common, peer) || is_far(peer)) return;
      std::byte* const heap = common.heaps[peer];
      store_release<Scope::system>(common.window.acknowledged(kKind, common.rank).in(heap), received);
      if (begins) store_release<Scope::system>(common.window.begun(kKind, common.rank).in(heap), epoch);
    });
  }
  /// Up to which call `peer` has received, acquired: what is written afterwards follows its reads of that call.
  DEEP_EP_DEVICE std::uint64_t load_acknowledged(int peer) const {
    return load_acquire<Scope::system>(common.window.acknowledged(kKind, peer).in(common.local));
  }
  /// Is there room at a peer that has acknowledged `seen`?
  DEEP_EP_DEVICE bool has_room(std::uint64_t seen) const { return epoch <= 2 || seen >= epoch - 2; }
  /// By one thread: waits for room, acquiring. False: the peer is to be left out, or the call is over.
  DEEP_EP_DEVICE bool await_room(int peer) const {
    constexpr Wanted kWanted =
        kKind == LowLatencyKind::dispatch ? Wanted::low_latency_dispatch_credit : Wanted::low_latency_combine_credit;
    const std::uint64_t* const word = common.window.acknowledged(kKind, peer).in(common.local);
    return epoch <= 2 || wait_signal(policy(), word, {peer, kWanted, epoch - 2});
  }

  // ---- Rows ----

  /// Row `slot` of `source` in the window of the rank with this heap.
  DEEP_EP_DEVICE std::byte* row(std::byte* heap, int source, int slot) const {
    return common.window.row(kKind, epoch, source, slot, row_bytes).in(heap);
  }
  /// The place from which a poster sends row `index` to rank `to`, or to all peers; and the word of a warp that shares
  /// the row, which holds the epoch once its part is there: see LowLatencyStaging.
  DEEP_EP_DEVICE Place<std::byte> staged_row(int to, int index) const {
    return common.staging.row(epoch, to, index, row_bytes);
  }
  DEEP_EP_DEVICE std::uint64_t* staged_flag(int to, int index, int warp = 0) const {
    return common.staging.ready(epoch, to, index, warp).in(common.local);
  }
  /// Row `slot` that this rank hands on, or its own part of it: see LowLatencyStaging.
  DEEP_EP_DEVICE std::byte* relayed_row(std::byte* heap, int node, int slot) const {
    return common.staging.relayed_row(kKind, epoch, node, slot, row_bytes).in(heap);
  }
  /// The word that says how far the rows of far rank `source` have come over a lane.
  DEEP_EP_DEVICE const std::uint64_t* progress(int source, int lane) const {
    return common.window.progress(kKind, epoch, source, lane).in(common.local);
  }
  /// May what `source` sends before its rows be read? Of a far rank once its word says so, which acquires it.
  DEEP_EP_DEVICE bool has_begun(int source) const {
    return !is_far(source) || load_acquire<Scope::system>(progress(source, 0)) >> 16 >= epoch;
  }
  /// Waits until it has come to `place` of the call, acquiring what was posted up to there by the lane of that place.
  template <class Group = OneThread>
  DEEP_EP_DEVICE bool await_progress(int source, int place, Wanted wanted) const {
    return wait_signal<Group>(policy(), progress(source, place == 0 ? 0 : lane(place - 1)),
                              {source, wanted, LowLatencyMailbox::progress_value(epoch, place)});
  }

  // ---- Of dispatch ----

  /// By one thread: waits for one cell of `source`'s counts. False: they do not come. `missed`: becomes the clock of
  /// the last look that did not find it. (Threads of a warp wait for different ranks, and may all go on with the last
  /// one.)
  DEEP_EP_DEVICE bool await_count(int source, int cell, std::uint64_t& payload, std::int64_t& missed) const {
    const Cell* counts = common.window.counts(epoch, source).in(common.local) + cell;
    return wait_until(policy(), {source, Wanted::low_latency_dispatch_counts, epoch}, [&](const Poll&) {
      if (has_begun(source)) {
        const Cell now = load_cell(counts);
        payload = now.payload;
        if (now.epoch >= epoch) return true;
      }
      missed = clock_cycles();
      return false;
    });
  }
  /// By a whole warp: waits until what `source`, which is far, has posted as row `slot` is there, acquiring.
  DEEP_EP_DEVICE bool await_posted(int source, int slot) const {
    return await_progress<WholeWarp>(source, slot + 1, Wanted::low_latency_dispatch_rows);
  }
  /// The rank to wait for if a row of `source` is missing: by rails the relay of this node that hands it on. A relay
  /// itself tells for which rank it has waited.
  DEEP_EP_DEVICE int deliverer(int source) const {
    return uses_rails() && is_far(source) && !is_relay(source) ? relay(source) : source;
  }

  // ---- Of combine ----

  /// The owner's selections: to be read once has_begun() says so. Each cell says by its epoch whether it is there.
  DEEP_EP_DEVICE const Cell* selections(int owner) const {
    return common.window.selections(epoch, owner).in(common.local);
  }
  /// By a whole warp: waits until a far owner has announced its selections, acquiring them.
  DEEP_EP_DEVICE bool await_announced(int far_owner) const {
    return await_progress<WholeWarp>(far_owner, 0, Wanted::low_latency_combine_selection);
  }
  /// By a whole warp: its part of the row is there, or of no use to the owner. Releases it to the poster.
  DEEP_EP_DEVICE void hand_over(int owner, int index, int warp) const {
    warp::sync();
    if (lane_index() == 0) store_release<Scope::system>(staged_flag(owner, index, warp), epoch);
  }
  /// By rails, in the relay's heap: the row of `member` of its node for a token of far `owner`. A relay does not put
  /// its own into the window: that place is for the rows that the owner has for it.
  DEEP_EP_DEVICE std::byte* row_of_member(std::byte* heap, int owner, int member, int token) const {
    if (relay(owner) == member) return relayed_row(heap, node(owner), token);
    const int width = common.rail_width;
    return row(heap, node(owner) * width + member % width, token);
  }
};

template <bool kRdma>
using DispatchCall = RankCall<LowLatencyKind::dispatch, kRdma>;
template <bool kRdma>
using CombineCall = RankCall<LowLatencyKind::combine, kRdma>;

// Ranks may be masked while a call runs. Then some blocks have received with a rank and others without it, and the last
// block to finish receives again, alone, from those that are left. All that these sent is there.

/// Words of shared memory that a block needs for it.
struct MaskWords {
  std::uint64_t version;     ///< of the masks, as the block saw them when it began to receive
  std::int32_t last, again;  ///< see compare_masks
};

/// By one thread, before the block looks at any mask.
DEEP_EP_DEVICE void note_masks(const LowLatencyParams& common, MaskWords& words) {
  words.version = common.mask == nullptr ? 0 : load_acquire<Scope::gpu>(&common.wait.control->version);
}

/// By one thread of a block that has received. `words.last`: all others have finished. `words.again`: not all that was
/// received was received with the same masks, and this block is to receive again.
DEEP_EP_DEVICE void compare_masks(const LowLatencyParams& common, LowLatencyKind kind, bool again, MaskWords& words) {
  LowLatencyCounters& counters = common.counters(kind);
  const auto blocks = static_cast<std::uint32_t>(common.working_blocks);
  if (!again) {
    add_relaxed<Scope::gpu>(&counters.versions, words.version);
    words.last = last_to_arrive<Scope::gpu>(&counters.finished, blocks) ? 1 : 0;
    words.again = 0;
    if (words.last == 0) return;
  }
  const std::uint64_t now = load_acquire<Scope::gpu>(&common.wait.control->version);
  const std::uint64_t seen = again ? words.version * blocks : load_relaxed<Scope::gpu>(&counters.versions);
  words.again = seen == now * blocks ? 0 : 1;
  words.version = now;
  store_relaxed<Scope::gpu>(&counters.versions, 0);
}

/// By every thread of the blocks that receive: `receive(again)`, until it has been the same ranks in all of the call.
/// True in the block that finishes last, with masking.
template <class Receive>
DEEP_EP_DEVICE bool receive_with_masks(const LowLatencyParams& common, LowLatencyKind kind, MaskWords& words,
                                       Receive receive) {
#pragma unroll 1
  for (bool again = false;; again = true) {
    receive(again);
    if (common.mask == nullptr) return false;
    block::sync();
    if (thread_index() == 0) compare_masks(common, kind, again, words);
    block::sync();
    if (words.again == 0) return words.last != 0;
  }
}

// How a call's rows and words get to a far rank: one warp, the only owner of the queue pair of its channel, posts what
// other blocks have staged, in the order of slots (dispatch) or tokens (combine).
//
// Order is all there is to rely on: an addition becomes visible behind the bytes posted before it. So a poster puts
// rows in a known order and adds to one word, how far it has come, which the receiver waits for. Words at the peer only
// grow: what is posted is the difference to what was posted before, and nothing is ever reset. Lanes are not ordered
// among each other: row i goes by lane i modulo the lanes, each of which has its word; all else goes by the first one.
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

/// One lane to one far rank in one call, by a whole warp. Functions that return bool return false when the rank is to
/// be left: it is given up, or the call is over.
template <class Call>
class CallPoster {
 public:
  /// `words`: of the warp.
  DEEP_EP_DEVICE CallPoster(const Call& call, const PostedLane& to, rdma::PosterWords& words)
      : call_(call),
        pair_(load(words, call.common, to)),
        queue_(pair_, call.common.posts),
        lane_(to.lane),
        found_posted_(queue_.posted()) {}

  DEEP_EP_DEVICE int peer() const { return pair_.queue.peer; }
  /// What precedes all rows, and words that no row waits for, go by the first lane.
  DEEP_EP_DEVICE bool is_first_lane() const { return lane_ == 0; }

  /// Tells the peer up to which call this rank has received.
  DEEP_EP_DEVICE bool acknowledge(std::uint64_t received) {
    return raise(window().acknowledged(Call::kCall, rank()), told().acknowledged, received);
  }
  /// Tells it that this rank has begun to send the call.
  DEEP_EP_DEVICE bool begin() { return raise(window().begun(Call::kCall, rank()), told().begun, call_.epoch); }
  /// Tells it that everything of this lane up to `place` of the call is there: see progress_value.
  DEEP_EP_DEVICE bool progress(int place) {
    const std::uint64_t value = LowLatencyMailbox::progress_value(call_.epoch, place);
    return raise(window().progress(Call::kCall, call_.epoch, rank(), lane_), told().progress[lane_][call_.epoch & 1],
                 value);
  }

  /// Waits for room at the peer, acquiring. What was posted is on its way meanwhile: two ranks may wait for each other.
  DEEP_EP_DEVICE bool await_room() {
    bool there = lane_index() != 0 || call_.has_room(call_.load_acknowledged(peer()));
    if (!warp::all(there)) {
      flush();
      there = lane_index() != 0 || call_.await_room(peer());
    }
    return warp::agree(there);
  }

  /// Copies from this rank's heap into the peer's. Each member for itself.
  template <class T>
  DEEP_EP_DEVICE bool put(Place<T> to, Place<T> from, std::uint32_t bytes, bool wanted) {
    return held(queue_.put(to.offset, from.offset, bytes, wanted));
  }
  DEEP_EP_DEVICE void flush() { queue_.flush(); }

  /// Posts up to 32 rows, a lane each (those with `mine` that go by this lane of the rank's), in the order of the lanes
  /// of the warp, and never holds back one that is ready with all before it. `staged()` says whether it is; then it
  /// goes from `from` to `to`, and progress(place) tells the peer. An addition may wait for the writes before it, a
  /// round trip: so the peer is told again only when what it was told before has arrived. Call tell_rest() behind the
  /// last rows.
  template <class Staged>
  DEEP_EP_DEVICE bool post_rows(bool mine, int place, Place<std::byte> to, Place<std::byte> from, Staged staged) {
    std::uint32_t left = warp::ballot(mine && call_.lane(place - 1) == lane_);
    while (left != 0) {
      std::uint32_t now = 0;
      const auto some_ready = [&](Poll&) {
        const std::uint32_t awaited = warp::ballot((left >> lane_index() & 1) != 0 && !staged());
        now = awaited == 0 ? left : left & ((1u << lowest_bit(awaited)) - 1);
        return now != 0 || may_tell();
      };
      if (!poll_until(some_ready, [&](const Poll&) { return leaves(); })) return false;
      if (now != 0) {
        const bool mine_now = (now >> lane_index() & 1) != 0;
        if (!put(to, from, call_.row_bytes, mine_now)) return false;
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

  /// Waits for the completions of what earlier kernels had posted (those of a rank that has been given up may never
  /// come), as the next kernel may write again what these had staged. Then gives the queue pair back.
  DEEP_EP_DEVICE void close() {
    if (!leaves()) held(queue_.wait_for(found_posted_));
    held(queue_.close());
  }

 private:
  DEEP_EP_DEVICE static const RdmaPeerParams& load(rdma::PosterWords& words, const LowLatencyParams& common,
                                                   const PostedLane& to) {
    words.load(common.queue_pair(channel_of(Call::kCall, to.lane), to.rank));
    return words.pair;
  }
  DEEP_EP_DEVICE const LowLatencyWindow& window() const { return call_.common.window; }
  DEEP_EP_DEVICE int rank() const { return call_.common.rank; }
  DEEP_EP_DEVICE LowLatencyMailbox& told() const {
    return call_.common.told[peer()].mailbox[static_cast<int>(Call::kCall)];
  }
  /// Makes a word of the peer's heap `value`, behind everything posted before.
  DEEP_EP_DEVICE bool raise(Place<std::uint64_t> word, std::uint64_t& told, std::uint64_t value) {
    return held(queue_.signal(word, told, value));
  }

  DEEP_EP_DEVICE bool may_tell() { return untold_ != 0 && queue_.reached(last_told_); }
  DEEP_EP_DEVICE bool leaves() const { return warp::any(call_.policy().gives_up(peer())); }
  DEEP_EP_DEVICE bool held(bool good) const {
    if (good) return true;
    if (lane_index() == 0) call_.policy().blame_queue(pair_.queue);
    warp::sync();
    return false;
  }

  const Call& call_;
  const RdmaPeerParams& pair_;
  rdma::PortChannel<WholeWarp> queue_;
  int lane_;
  std::uint64_t found_posted_;
  std::uint64_t last_told_ = 0;  ///< ticket of the last progress
  int untold_ = 0;               ///< place up to which rows are posted; 0: the peer has been told of all
};

/// By a whole warp of a block that posts: serves one rank, or one lane to it. `post(poster)` posts what the peer gets
/// in the call that is sent; with `begins` the peer is also told that the call has begun.
template <class Call, class Post>
DEEP_EP_DEVICE void serve_lane(const Call& call, std::uint64_t received, bool sends, bool begins,
                               rdma::PosterWords* words, Post post) {
  const PostedLane to = call.posted_lane();
  if (to.rank < 0 || warp::any(masked(call.common, to.rank))) return;
  CallPoster poster(call, to, words[warp_index()]);
  const bool first = poster.is_first_lane();
  const bool on = !first || (poster.acknowledge(received) && (!sends || !begins || poster.begin()));
  if (sends && on && poster.await_room()) post(poster);
  poster.close();
}

}  // namespace deep_ep::device::low_latency
