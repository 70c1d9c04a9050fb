// The ranks, as low-latency calls see them: how each is reached, where rows and words for it or of it lie, whether they
// are there, and what becomes of a wait for one that does not come.
//
// A rank is reached with stores over NVLink (near), through this rank's NIC (far), or through its NIC and one more rank
// (by rails). Near peers see tags and cells; a far one sees rows whole, once the word of its source's poster says how
// far they have come (by RDMA the pieces of a line come in any order, tag or not).
//
// By rails: where nodes have several ranks each, a row crosses the network once for each node, between ranks that have
// the same index in their nodes, and is handed on over NVLink. Nodes are of equally many consecutive ranks.
//
//   one to many   sender -- NIC --> its rail in the other node, the relay -- NVLink --> each rank that wants the row
//   many to one   each rank with a part -- NVLink --> the receiver's rail there, the relay, adds -- NIC --> receiver
//
// A relay hands on within its own call: so either all ranks of a call go by rails or none does. In the receiver's
// window, rows of dispatch that are handed on take the place of their far source. In the relay's, rows of combine from
// a rank of its node take the place of the rank with the same index in the owner's node, which sends it none; its own
// do not travel. Counts, selections and acknowledgements always go directly.
//
// Ranks that do not come. A peer that is late is a fault that ends the call. If the buffer masks ranks, the control
// threads of the ranks decide which rank is lost (csrc/control/), and calls go on without it: see ends_late_wait(). No
// wait masks a rank by itself.
//
// Ranks of combine wait for each other in a row: an expert rank for the selections of an owner, the owner for rows of
// the expert rank.
//
//   - A late rank holds up no call of others: a rank tells its selections first to the ranks that are ready, and
//     pushes rows whose selections are late last. So a rank waits only for ranks that it names.
//   - With masking, each rank waits for all others to begin, whether it has to do with them or not: what a masked rank
//     writes when it wakes up must not be summed.
//
// By rails (never with masking) an owner waits for a relay, which waits for the ranks of its node.
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

/// Consecutive common.
struct RankRange {
  int first, count;
};

/// What a warp posts to.
struct PostedLane {
  int rank, lane;
};

/// How each rank is reached. `kRdma` false: nobody is far.
template <bool kRdma>
struct Reach {
  const LowLatencyParams& common;

  /// A far rank is not mapped here, and does not map this one.
  DEEP_EP_DEVICE bool is_far(int rank) const {
    return kRdma && common.peers != nullptr &&
           (common.far_ranks[static_cast<unsigned>(rank) / 32] >> static_cast<unsigned>(rank) % 32 & 1) != 0;
  }
  DEEP_EP_DEVICE bool by_rails() const { return kRdma && common.rail_width != 0; }

  /// Is this a block that posts?
  DEEP_EP_DEVICE bool posts() const { return kRdma && block_index() >= common.working_blocks; }
  /// In blocks that post: the far rank that this warp serves, or -1, and over which lane. The first lanes of all ranks
  /// come first.
  DEEP_EP_DEVICE PostedLane posted() const {
    const int index = first_posted() + warp_index();
    if (index >= common.num_far * common.lanes) return {-1, 0};
    return {far_rank(index % common.num_far), index / common.num_far};
  }
  /// Has a warp of this block a first lane?
  DEEP_EP_DEVICE bool posts_first_lanes() const { return first_posted() < common.num_far; }
  /// The lane that row `number` takes.
  DEEP_EP_DEVICE int lane_of(int number) const { return number & (common.lanes - 1); }

  // The others are for calls that go by rails.

  DEEP_EP_DEVICE int num_nodes() const { return by_rails() ? common.num_ranks / common.rail_width : 1; }
  DEEP_EP_DEVICE int node_of(int rank) const { return rank / common.rail_width; }
  DEEP_EP_DEVICE int own_node() const { return node_of(common.rank); }
  DEEP_EP_DEVICE bool is_of_own_node(int rank) const { return node_of(rank) == own_node(); }
  /// The rank of `node` that this rank exchanges rows with.
  DEEP_EP_DEVICE int rail_in(int node) const { return node * common.rail_width + common.rank % common.rail_width; }
  /// The rank of this node that exchanges rows with `far_rank`.
  DEEP_EP_DEVICE int relay_of(int far_rank) const {
    return own_node() * common.rail_width + far_rank % common.rail_width;
  }
  /// Are this rank and `far_rank` those that exchange the rows of their nodes? Also where no rails are: then nobody is.
  DEEP_EP_DEVICE bool has_rail_to(int far_rank) const { return by_rails() && relay_of(far_rank) == common.rank; }
  /// The rank whose row stands for that of `rank`: of another node, this rank's rail there. Also where no rails are.
  DEEP_EP_DEVICE int speaker_of(int rank) const {
    return by_rails() && rank >= 0 && !is_of_own_node(rank) ? rail_in(node_of(rank)) : rank;
  }
  /// The ranks that get this rank's rows through far rank `peer`. Also where no rails are: then it is itself.
  DEEP_EP_DEVICE RankRange served_by(int peer) const {
    if (!by_rails()) return {peer, 1};
    return {node_of(peer) * common.rail_width, has_rail_to(peer) ? static_cast<int>(common.rail_width) : 0};
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
/// the poster of an earlier call may have ended before one failed, and the rank at its other end may wait for what is
/// lost while this rank waits for that one, or for another that waits for it.
template <bool kRdma>
struct FailureLook {
  const LowLatencyParams& common;

  DEEP_EP_DEVICE void operator()() const {
    if (!kRdma) return;
    const std::uint32_t looks = fetch_add_relaxed<Scope::gpu>(&common.wait.control->failure_looks, 1u);
    const auto peer = static_cast<int>(looks % static_cast<std::uint32_t>(common.num_ranks));
    if (!Reach<kRdma>{common}.is_far(peer)) return;
#pragma unroll 1
    for (int channel = 0; channel < low_latency_channels(common.lanes); ++channel) {
      const rdma::CompletionEntry& entry = *common.peers[channel * common.num_ranks + peer].queue.completion;
      const std::uint32_t opcode = rdma::tail_opcode(load_acquire<Scope::system>(&entry.tail));
      if (opcode == rdma::kCompletionOk || opcode == rdma::kCompletionNotYetWritten) continue;
      store_release<Scope::system>(common.wait.control->words->failed + peer,
                                   rdma::failure_in(entry, opcode).packed() + 1);
    }
  }
};

/// Without masking no rank tells that it has begun a combine. There `begun` with this bit says that the rank has ended
/// the call, as it disagrees with another rank (refuse_call).
constexpr std::uint64_t kRefused = std::uint64_t{1} << 63;

/// Ends the combine `epoch`, as `peer` means another one or selects what was not dispatched (`field` 1), or as it has
/// ended the call for such a reason. Tells the near ranks, so that they need not find out by their deadlines: of those
/// that wait for this rank, not all wait for that one. First, so that they do not take it for late before.
DEEP_EP_DEVICE_CALL void refuse_call(const LowLatencyParams& common, std::uint64_t epoch, int peer, int field,
                                     std::uint64_t ours, std::uint64_t theirs,
                                     Wanted wanted = Wanted::low_latency_combine_selection) {
#pragma unroll 1
  for (int rank = 0; common.mask == nullptr && rank < common.num_ranks; ++rank) {
    std::byte* heap = common.heaps[rank];
    if (heap == nullptr) continue;  // it is far
    std::uint64_t* word = common.window.begun(LowLatencyKind::combine, common.rank).in(heap);
    store_relaxed<Scope::system>(word, kRefused | epoch);
  }
  report_fault(common.wait, FaultKind::mismatch, wanted, peer, field, ours, theirs);
}

/// The policy of waits, and of failures of queue pairs. `kRdma` false: no rank is far. `kCombines`: of a combine,
/// which ranks may refuse.
template <bool kRdma, bool kCombines = false>
struct MaskOrEnd {
  const LowLatencyParams& common;
  std::uint64_t epoch = 0;  ///< of the combine

  DEEP_EP_DEVICE bool gives_up(int peer) const { return aborted(common.wait) || masked(common, peer); }
  DEEP_EP_DEVICE bool called_off(const Awaited& awaited) const { return gives_up(awaited.peer); }
  DEEP_EP_DEVICE bool is_late(const Awaited& awaited, std::uint64_t begin) const {
    return may_be_late(begin) && (refused(awaited.peer) || ends_late_wait(common.wait, awaited.peer, awaited.wanted,
                                                                          begin, FailureLook<kRdma>{common}));
  }
  /// Ends the call; or goes on, where the peer is masked now.
  DEEP_EP_DEVICE void blame(const Awaited& awaited, std::uint64_t seen) const {
    if (refused(awaited.peer)) {
      return refuse_call(common, epoch, awaited.peer, 0, 0, 0, Wanted::low_latency_combine_rows);
    }
    if (masked(common, awaited.peer)) return;
    report_fault(common.wait, FaultKind::timeout, awaited.wanted, awaited.peer,
                 common.mask == nullptr ? 0 : kMostTimeouts, awaited.expected, seen);
  }
  /// Ends the call. With masking the control thread knows that the queue pair has failed: its verdict comes.
  DEEP_EP_DEVICE void blame_queue(const RdmaQueuePair& queue) const {
    if (common.mask != nullptr || gives_up(queue.peer)) return;
    const auto failure = static_cast<std::int32_t>(load_relaxed<Scope::gpu>(&queue.state->failure));
    report_fault(common.wait, FaultKind::rdma_failed, Wanted::rdma_completion, queue.peer, failure, 0, 0);
  }

 private:
  /// A rank that has refused an earlier combine sends nothing of this one either.
  DEEP_EP_DEVICE bool refused(int peer) const {
    if (!kCombines) return false;
    const std::uint64_t word =
        load_relaxed<Scope::system>(common.window.begun(LowLatencyKind::combine, peer).in(common.local));
    return (word & kRefused) != 0 && (word & ~kRefused) <= epoch;  // never with masking
  }
};

/// What both kinds of calls have in common: one rank's reach in one call. `row_bytes`: of a row as it travels.
template <LowLatencyKind kKind, bool kRdma>
struct CallReach : Reach<kRdma> {
  static constexpr LowLatencyKind kCall = kKind;
  using Reach<kRdma>::common;
  std::uint64_t epoch;
  std::uint32_t row_bytes;

  DEEP_EP_DEVICE CallReach(const LowLatencyParams& params, std::uint64_t call, std::uint32_t bytes)
      : Reach<kRdma>{params}, epoch(call), row_bytes(bytes) {}

  DEEP_EP_DEVICE MaskOrEnd<kRdma, kKind == LowLatencyKind::combine> policy() const { return {common, epoch}; }

  /// By a whole warp: tells the near ranks up to which call this one has received, ordered after all reads of that
  /// call; and where it `begins` that it has begun to send this one, releasing what the thread wrote before. A far rank
  /// is told by its poster.
  DEEP_EP_DEVICE void acknowledge_all(std::uint64_t received, bool begins = false) const {
#pragma unroll 1
    for (int peer = lane_index(); peer < common.num_ranks; peer += kWarpSize) {
      if (masked(common, peer) || this->is_far(peer)) continue;
      std::byte* const heap = common.heaps[peer];
      store_release<Scope::system>(common.window.acknowledged(kKind, common.rank).in(heap), received);
      if (begins) store_release<Scope::system>(common.window.begun(kKind, common.rank).in(heap), epoch);
    }
  }
  /// Up to which call `peer` has received, loaded in time for writing to it: what is written afterwards follows its
  /// reads of that call.
  DEEP_EP_DEVICE std::uint64_t load_acknowledged(int peer) const {
    return load_acquire<Scope::system>(common.window.acknowledged(kKind, peer).in(common.local));
  }
  /// A call takes the places of the call before the last. May it, at a peer that has acknowledged `seen`?
  DEEP_EP_DEVICE bool has_room(std::uint64_t seen) const { return epoch <= 2 || seen >= epoch - 2; }
  /// By one thread: waits until it may, acquiring. False: the peer is to be left out, or the call is over.
  DEEP_EP_DEVICE bool await_room(int peer) const {
    if (epoch <= 2) return true;
    constexpr Wanted kWanted =
        kKind == LowLatencyKind::dispatch ? Wanted::low_latency_dispatch_credit : Wanted::low_latency_combine_credit;
    const std::uint64_t* acknowledged = common.window.acknowledged(kKind, peer).in(common.local);
    return wait_signal(policy(), acknowledged, {peer, kWanted, epoch - 2});
  }

  /// Row `slot` of `source` in the window of the rank with this heap.
  DEEP_EP_DEVICE std::byte* row(std::byte* heap, int source, int slot) const {
    return common.window.row(kKind, epoch, source, slot, row_bytes).in(heap);
  }
  /// Row `slot` that this rank hands on, or its own part of it: see LowLatencyStaging.
  DEEP_EP_DEVICE std::byte* relayed_row(std::byte* heap, int node, int slot) const {
    return common.staging.relayed_row(kKind, epoch, node, slot, row_bytes).in(heap);
  }
  /// The word that says how far the rows of far rank `source` have come over a lane.
  DEEP_EP_DEVICE const std::uint64_t* progress(int source, int lane) const {
    return common.window.progress(kKind, epoch, source, lane).in(common.local);
  }
  /// Waits until it has come to `place` of the call, acquiring what was posted up to there by the lane of that place.
  template <class Group = OneThread>
  DEEP_EP_DEVICE bool await_progress(int source, int place, Wanted wanted) const {
    const int lane = place == 0 ? 0 : this->lane_of(place - 1);
    return wait_signal<Group>(policy(), progress(source, lane),
                              {source, wanted, LowLatencyMailbox::progress_value(epoch, place)});
  }
};

template <bool kRdma>
struct DispatchReach : CallReach<LowLatencyKind::dispatch, kRdma> {
  using CallReach<LowLatencyKind::dispatch, kRdma>::CallReach;

  /// The row of a token, for all that posters post it to; and the word that holds the epoch once it is there.
  DEEP_EP_DEVICE Place<std::byte> staged_row(int token) const {
    return this->common.staging.dispatch_row(this->epoch, token, this->row_bytes);
  }
  DEEP_EP_DEVICE std::uint64_t* staged_flag(int token) const {
    return this->common.staging.dispatch_ready(this->epoch, token).in(this->common.local);
  }

  /// By one thread: waits for one cell of `source`'s counts. False: they do not come.
  DEEP_EP_DEVICE bool await_count(int source, int cell, std::uint64_t& payload) const {
    constexpr Wanted kWanted = Wanted::low_latency_dispatch_counts;
    const Cell* counts = this->common.window.counts(this->epoch, source).in(this->common.local) + cell;
    if (!this->is_far(source)) {
      return wait_cell(this->policy(), counts, {source, kWanted, this->epoch}, payload);
    }
    const bool there = this->await_progress(source, 0, kWanted);
    if (there) payload = load_cell(counts).payload;
    return there;
  }
  /// By a whole warp: waits until what `source`, which is far, has posted as row `slot` is there, acquiring.
  DEEP_EP_DEVICE bool await_posted(int source, int slot) const {
    return this->template await_progress<WholeWarp>(source, slot + 1, Wanted::low_latency_dispatch_rows);
  }
  /// The rank to wait for if a row of `source` is missing: by rails the relay of this node that hands it on. A relay
  /// itself tells for which rank it has waited.
  DEEP_EP_DEVICE int deliverer(int source) const {
    const bool handed_on = this->by_rails() && this->is_far(source) && !this->has_rail_to(source);
    return handed_on ? this->relay_of(source) : source;
  }
};

template <bool kRdma>
struct CombineReach : CallReach<LowLatencyKind::combine, kRdma> {
  using CallReach<LowLatencyKind::combine, kRdma>::CallReach;

  /// The selections of a near owner's token; each says by its epoch whether it is there.
  DEEP_EP_DEVICE const Cell* selections(int owner, int token) const {
    return this->common.window.selections(this->epoch, owner, token).in(this->common.local);
  }
  /// Those of a far owner, all together (FarSelections): there once has_announced() says so, which acquires them.
  DEEP_EP_DEVICE const std::uint64_t* far_selections(int owner) const {
    return reinterpret_cast<const std::uint64_t*>(selections(owner, 0));
  }
  DEEP_EP_DEVICE bool has_announced(int far_owner) const {
    return load_acquire<Scope::system>(this->progress(far_owner, 0)) >> 16 >= this->epoch;
  }

  /// The place from which a poster sends row `index` to a far owner; and a word of each warp that shares the row, which
  /// says that the warp's part is there.
  DEEP_EP_DEVICE Place<std::byte> staged_row(int owner, int index) const {
    return this->common.staging.combine_row(this->epoch, owner, index, this->row_bytes);
  }
  DEEP_EP_DEVICE std::uint64_t* staged_flag(int owner, int index, int warp) const {
    return this->common.staging.combine_ready(this->epoch, owner, index, warp).in(this->common.local);
  }
  /// By a whole warp: its part of the row is there, or there is no such row (`any` false). Releases it to the poster.
  DEEP_EP_DEVICE void hand_over(int owner, int index, int warp, bool any = true) const {
    warp::sync();
    const std::uint64_t flag = any ? this->epoch : LowLatencyStaging::no_row_flag(this->epoch);
    if (lane_index() == 0) store_release<Scope::system>(staged_flag(owner, index, warp), flag);
  }

  /// By rails, in the relay's heap: the row of `member` of its node for a token of far `owner`. A relay does not put
  /// its own into the window: that place is for the rows that the owner has for it.
  DEEP_EP_DEVICE std::byte* row_of_member(std::byte* heap, int owner, int member, int token) const {
    const int node = this->node_of(owner);
    if (this->relay_of(owner) == member) return this->relayed_row(heap, node, token);
    const int width = this->common.rail_width;
    return this->row(heap, node * width + member % width, token);
  }
};

// Ranks may be masked while a call runs. Then some blocks have received with a rank and others without it, and the last
// block to finish receives again, alone, with those that are left. All that these sent is there: a rank that a block
// waited for in vain is masked.

/// Words of shared memory that a block needs for it.
struct MaskWords {
  std::uint64_t version;     ///< of the masks, as the block saw them when it began
  std::int32_t last, again;  ///< see finish_with_masks
};

/// By one thread, before the block looks at any mask. A block that saw a newer one than this version finds that out at
/// the end.
DEEP_EP_DEVICE void note_masks(const LowLatencyParams& common, MaskWords& words) {
  words.version = common.mask == nullptr ? 0 : load_acquire<Scope::gpu>(&common.wait.control->version);
}

/// By every thread of the blocks that receive, when they have. `words.last`: all others have finished. `words.again`:
/// not all blocks saw the same masks, and this block is to receive again.
DEEP_EP_DEVICE void finish_with_masks(const LowLatencyParams& common, LowLatencyKind kind, MaskWords& words) {
  block::sync();
  if (thread_index() == 0) {
    LowLatencyCounters& counters = common.counters(kind);
    const auto blocks = static_cast<std::uint32_t>(common.working_blocks);
    add_relaxed<Scope::gpu>(&counters.versions, words.version);
    words.last = words.again = 0;
    if (last_to_arrive<Scope::gpu>(&counters.finished, blocks)) {
      const std::uint64_t now = load_acquire<Scope::gpu>(&common.wait.control->version);
      words.last = 1;
      words.again = load_relaxed<Scope::gpu>(&counters.versions) == now * blocks ? 0 : 1;
      words.version = now;
      store_relaxed<Scope::gpu>(&counters.versions, 0);
    }
  }
  block::sync();
}

/// By every thread of the block that has received again. `words.again`: masks have changed since it began to.
DEEP_EP_DEVICE void compare_masks(const LowLatencyParams& common, MaskWords& words) {
  block::sync();
  if (thread_index() == 0) {
    const std::uint64_t now = load_acquire<Scope::gpu>(&common.wait.control->version);
    words.again = words.version == now ? 0 : 1;
    words.version = now;
  }
  block::sync();
}

}  // namespace deep_ep::device::low_latency
