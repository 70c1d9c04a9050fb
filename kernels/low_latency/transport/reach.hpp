// The reach of low-latency calls: where rows and words for a peer or of a peer lie, and whether they are there. Near
// peers see tags and cells; a far one sees rows whole, once the word of its source's poster says how far they have come
// (by RDMA the pieces of a line come in any order, tag or not). By rails, rdma/reach.hpp, another rank is in between.
//
// In the receiver's window, rows of dispatch that are handed on take the place of their far source. In the relay's,
// rows of combine from a rank of its node take the place of the rank with the same index in the owner's node, which
// sends it none; its own do not travel. Counts, selections and acknowledgements always go directly.
#pragma once

#include "kernels/low_latency/transport/masks.hpp"

namespace deep_ep::device::low_latency {

/// What both kinds of calls have in common: one rank's reach in one call. `row_bytes`: of a row as it travels.
template <LowLatencyKind kKind, bool kRdma, bool kRails>
struct CallReach : Reach<kRdma, kRails> {
  static constexpr LowLatencyKind kCall = kKind;
  const LowLatencyParams& common;
  std::uint64_t epoch;
  std::uint32_t row_bytes;

  DEEP_EP_DEVICE CallReach(const LowLatencyParams& params, std::uint64_t call, std::uint32_t bytes)
      : Reach<kRdma, kRails>{params}, common(params), epoch(call), row_bytes(bytes) {}

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
struct DispatchReach : CallReach<LowLatencyKind::dispatch, kRdma, kRdma> {
  using CallReach<LowLatencyKind::dispatch, kRdma, kRdma>::CallReach;

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

template <bool kRdma, bool kRails>
struct CombineReach : CallReach<LowLatencyKind::combine, kRdma, kRails> {
  using CallReach<LowLatencyKind::combine, kRdma, kRails>::CallReach;

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

}  // namespace deep_ep::device::low_latency
