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

/// What both kinds of calls have in common: one rank's reach in one call.
template <LowLatencyKind kKind, bool kRdma, bool kRails>
struct CallReach : Reach<kRdma, kRails> {
  static constexpr LowLatencyKind kCall = kKind;
  const LowLatencyParams& common;
  std::uint64_t epoch;

  DEEP_EP_DEVICE CallReach(const LowLatencyParams& params, std::uint64_t call)
      : Reach<kRdma, kRails>{params}, common(params), epoch(call) {}

  DEEP_EP_DEVICE MaskOrEnd<kRdma, kKind == LowLatencyKind::combine> policy() const { return {common, epoch}; }

  /// Tells `peer` up to which call this rank has received, ordered after all reads of that call. A far peer is told by
  /// its poster.
  DEEP_EP_DEVICE void acknowledge(int peer, std::uint64_t received) const {
    if (this->is_far(peer)) return;
    std::uint64_t* word = common.window.acknowledged(kKind, common.rank).in(common.heaps[peer]);
    store_release<Scope::system>(word, received);
  }
  /// The same by a thread that has fenced at system scope since that call was read.
  DEEP_EP_DEVICE void acknowledge_fenced(int peer, std::uint64_t received) const {
    if (this->is_far(peer)) return;
    store_relaxed<Scope::system>(common.window.acknowledged(kKind, common.rank).in(common.heaps[peer]), received);
  }
  /// Tells `peer` that this rank has begun to send the call, releasing what this thread wrote before. A far peer is
  /// told by its poster.
  DEEP_EP_DEVICE void begin(int peer) const {
    if (this->is_far(peer)) return;
    store_release<Scope::system>(common.window.begun(kKind, common.rank).in(common.heaps[peer]), epoch);
  }

  /// Acknowledges to all ranks that are not masked, and tells them that this one begins, where it does. By a whole
  /// warp.
  DEEP_EP_DEVICE void acknowledge_all(std::uint64_t received, bool begins = false) const {
#pragma unroll 1
    for (int peer = lane_index(); peer < common.num_ranks; peer += kWarpSize) {
      if (masked(common, peer)) continue;
      acknowledge(peer, received);
      if (begins) begin(peer);
    }
  }

  /// Where `peer` says up to which call it has received.
  DEEP_EP_DEVICE const std::uint64_t* acknowledged(int peer) const {
    return common.window.acknowledged(kKind, peer).in(common.local);
  }
  /// Loads that, in time for writing to the peer: what is written afterwards follows the peer's reads of that call.
  DEEP_EP_DEVICE std::uint64_t load_acknowledged(int peer) const {
    return load_acquire<Scope::system>(acknowledged(peer));
  }
  /// A call takes the places of the call before the last. May it, at a peer that has acknowledged `seen`?
  DEEP_EP_DEVICE bool has_room(std::uint64_t seen) const { return epoch <= 2 || seen >= epoch - 2; }
  /// By one thread: waits until it may, acquiring. At once for a far peer, as its poster waits. False: the peer is to
  /// be left out, or the call is over.
  DEEP_EP_DEVICE bool await_room(int peer) const { return this->is_far(peer) || await_acknowledged(peer); }
  /// The same also for a far peer.
  DEEP_EP_DEVICE bool await_acknowledged(int peer) const {
    if (epoch <= 2) return true;
    constexpr Wanted kWanted =
        kKind == LowLatencyKind::dispatch ? Wanted::low_latency_dispatch_credit : Wanted::low_latency_combine_credit;
    return wait_signal(policy(), acknowledged(peer), {peer, kWanted, epoch - 2});
  }

 protected:
  DEEP_EP_DEVICE const std::uint64_t* progress(int source, int lane) const {
    return common.window.progress(kKind, epoch, source, lane).in(common.local);
  }
  /// Waits until `source`, which is far, has come to `place` of the call, acquiring what it posted up to there by the
  /// lane of that place.
  template <class Group = OneThread>
  DEEP_EP_DEVICE bool await_progress(int source, int place, Wanted wanted) const {
    const int lane = place == 0 ? 0 : this->lane_of(place - 1);
    return wait_signal<Group>(policy(), progress(source, lane),
                              {source, wanted, LowLatencyMailbox::progress_value(epoch, place)});
  }
  DEEP_EP_DEVICE std::byte* row_in(std::byte* heap, int source, int slot, std::uint32_t row_bytes) const {
    return common.window.row(kKind, epoch, source, slot, row_bytes).in(heap);
  }
};

template <bool kRdma>
struct DispatchReach : CallReach<LowLatencyKind::dispatch, kRdma, kRdma> {
  using Base = CallReach<LowLatencyKind::dispatch, kRdma, kRdma>;
  static constexpr LowLatencyKind kDispatch = LowLatencyKind::dispatch;
  std::byte* const* heaps;  ///< every rank's; may be a copy
  std::uint32_t row_bytes;

  DEEP_EP_DEVICE DispatchReach(const LowLatencyParams& params, std::uint64_t call, std::byte* const* of_ranks,
                               std::uint32_t bytes)
      : Base(params, call), heaps(of_ranks), row_bytes(bytes) {}

  // ---- As source ----

  /// Where this rank's counts for `rank` go, with store_cell. nullptr: to be posted.
  DEEP_EP_DEVICE Cell* counts_to(int rank) const {
    if (this->is_far(rank)) return nullptr;
    return this->common.window.counts(this->epoch, this->common.rank).in(heaps[rank]);
  }
  /// Where this rank's row `slot` for `rank` goes, in tagged lines. nullptr: to be posted, from staged_row.
  DEEP_EP_DEVICE std::byte* row_to(int rank, int slot) const {
    return this->is_far(rank) ? nullptr : this->row_in(heaps[rank], this->common.rank, slot, row_bytes);
  }
  /// The row of a token for all that posters post it to.
  DEEP_EP_DEVICE std::byte* staged_row(int token) const { return staged_place(token).in(this->common.local); }
  DEEP_EP_DEVICE Place<std::byte> staged_place(int token) const {
    return this->common.staging.dispatch_row(this->epoch, token, row_bytes);
  }
  /// Where posters put row `slot`: at who receives it, or by rails at who hands it on.
  DEEP_EP_DEVICE Place<std::byte> posted_to(int slot) const {
    const LowLatencyParams& common = this->common;
    if (!this->by_rails()) return common.window.row(kDispatch, this->epoch, common.rank, slot, row_bytes);
    return common.staging.relayed_row(kDispatch, this->epoch, this->own_node(), slot, row_bytes);
  }
  /// By one thread, when the block has written the row and synced: releases it to the posters.
  DEEP_EP_DEVICE void hand_over(int token) const { store_release<Scope::system>(ready(token), this->epoch); }
  /// By a poster: is the row staged? Acquires it.
  DEEP_EP_DEVICE bool is_staged(int token) const { return load_acquire<Scope::gpu>(ready(token)) >= this->epoch; }

  // ---- As receiver ----

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
  /// Row `slot` of `source`, whose lines have tags.
  DEEP_EP_DEVICE const std::byte* row_from(int source, int slot) const {
    return this->row_in(this->common.local, source, slot, row_bytes);
  }
  /// By a whole warp: waits until the row's tags may be trusted, acquiring. At once where they always may: they come by
  /// NVLink. False: the row does not come.
  DEEP_EP_DEVICE bool await_row(int source, int slot) const {
    return !this->is_far(source) || this->by_rails() || await_posted(source, slot);
  }
  /// For whom to wait if a row of `source` is missing: by rails the relay of this node that hands it on, which itself
  /// tells for whom it has waited.
  DEEP_EP_DEVICE int awaited_for(int source) const {
    const bool handed_on = this->by_rails() && this->is_far(source) && !this->has_rail_to(source);
    return handed_on ? this->relay_of(source) : source;
  }
  /// Rows come in so many turns; between two of them, this rank hands on what others sent it for its node.
  DEEP_EP_DEVICE int turns() const { return this->by_rails() ? 2 : 1; }
  /// Whose rows come in a turn, where ranks go round: first those of its own node, which come soonest.
  DEEP_EP_DEVICE int first_of_turn(int turn) const {
    return this->by_rails() ? (this->own_node() + turn) * this->common.rail_width : 0;
  }
  DEEP_EP_DEVICE const Divisor& sources_of_turn(int turn) const {
    if (!this->by_rails()) return this->common.num_ranks;
    return turn == 0 ? this->common.rail_width : this->common.other_nodes_ranks;
  }

  // ---- As relay ----

  /// Row `slot` that this rank's rail in `node` has sent it for all of its node: waits for it like await_row. nullptr:
  /// it does not come.
  DEEP_EP_DEVICE const std::byte* await_relayed(int node, int slot) const {
    if (!await_posted(this->rail_in(node), slot)) return nullptr;
    return this->common.staging.relayed_row(kDispatch, this->epoch, node, slot, row_bytes).in(this->common.local);
  }
  /// Where it goes: row `slot` of `source` for `rank`, which is of this node.
  DEEP_EP_DEVICE std::byte* relayed_to(int rank, int source, int slot) const {
    return this->row_in(heaps[rank], source, slot, row_bytes);
  }

 private:
  DEEP_EP_DEVICE std::uint64_t* ready(int token) const {
    return this->common.staging.dispatch_ready(this->epoch, token).in(this->common.local);
  }
  DEEP_EP_DEVICE bool await_posted(int source, int slot) const {
    return this->template await_progress<WholeWarp>(source, slot + 1, Wanted::low_latency_dispatch_rows);
  }
};

template <bool kRdma, bool kRails>
struct CombineReach : CallReach<LowLatencyKind::combine, kRdma, kRails> {
  using Base = CallReach<LowLatencyKind::combine, kRdma, kRails>;
  static constexpr LowLatencyKind kCombine = LowLatencyKind::combine;
  std::uint32_t row_bytes;

  DEEP_EP_DEVICE CombineReach(const LowLatencyParams& params, std::uint64_t call, std::uint32_t bytes)
      : Base(params, call), row_bytes(bytes) {}

  // ---- Selections ----

  /// Where this rank's selections of a token go, with store_cell. nullptr: to be posted.
  DEEP_EP_DEVICE Cell* selections_to(int peer, int token) const {
    if (this->is_far(peer)) return nullptr;
    return this->common.window.selections(this->epoch, this->common.rank, token).in(this->common.heaps[peer]);
  }
  /// Those of a near owner; each says by its epoch whether it is there.
  DEEP_EP_DEVICE const Cell* selections_from(int owner, int token) const {
    return this->common.window.selections(this->epoch, owner, token).in(this->common.local);
  }
  /// Those of a far owner, all together (FarSelections): there once has_announced() says so.
  DEEP_EP_DEVICE const std::uint64_t* far_selections(int owner) const {
    return reinterpret_cast<const std::uint64_t*>(selections_from(owner, 0));
  }
  /// Where a block of posters gathers those of this rank, and where they put them at a far peer.
  DEEP_EP_DEVICE Place<std::uint64_t> staged_selections() const {
    return this->common.staging.selections(this->epoch, block_index() - this->common.working_blocks);
  }
  DEEP_EP_DEVICE Place<std::uint64_t> far_selections_to() const {
    return {this->common.window.selections(this->epoch, this->common.rank, 0).offset};
  }
  /// Acquires them.
  DEEP_EP_DEVICE bool has_announced(int far_owner) const {
    return load_acquire<Scope::system>(this->progress(far_owner, 0)) >> 16 >= this->epoch;
  }
  /// By a whole warp: waits for that. False: they do not come.
  DEEP_EP_DEVICE bool await_announced(int far_owner) const {
    return warp::agree(lane_index() != 0 || this->await_progress(far_owner, 0, Wanted::low_latency_combine_selection));
  }

  // ---- As expert side ----

  /// Is there room for this rank's rows for a far owner, whose word has come? By rails they go to another rank, whose
  /// word has to have come, too: nearly always long ago. Acquires it.
  DEEP_EP_DEVICE bool has_room_on_way_to(int far_owner) const {
    if (!this->by_rails() || this->has_rail_to(far_owner)) return true;
    return this->has_room(load_acquire<Scope::system>(this->acknowledged(this->relay_of(far_owner))));
  }
  /// What is missing for rows to `owner`, when they have been put off for too long.
  DEEP_EP_DEVICE Awaited missing_for(int owner) const {
    if (this->by_rails() && this->is_far(owner) && has_announced(owner)) {
      return {this->relay_of(owner), Wanted::low_latency_combine_credit, this->epoch - 2};
    }
    return {owner, Wanted::low_latency_combine_selection, this->epoch};
  }
  /// Where this rank's row for `token` of `owner` goes, in tagged lines: to its window, or that of who adds up the rows
  /// for it; or, as number `index`, where a poster finds it.
  DEEP_EP_DEVICE std::byte* row_to(int owner, int index, int token) const {
    const LowLatencyParams& common = this->common;
    if (!this->is_far(owner)) return this->row_in(common.heaps[owner], common.rank, token, row_bytes);
    if (!this->by_rails()) return staged_row(owner, index);
    return row_at_relay(common.heaps[this->relay_of(owner)], owner, common.rank, token);
  }
  /// By each warp that shares the row: its part of it is at row_to, or there is no such row (`any` false). Releases it
  /// to a poster, where one waits for it.
  DEEP_EP_DEVICE void hand_over(int owner, int index, int warp, bool any) const {
    if (!this->is_far(owner) || this->by_rails()) return;
    warp::sync();
    if (lane_index() != 0) return;
    const std::uint64_t flag = any ? this->epoch : LowLatencyStaging::no_row_flag(this->epoch);
    store_release<Scope::system>(ready(owner, index, warp), flag);
  }

  // ---- As owner, and by rails as relay ----

  /// Whose tokens a rank adds up, in so many turns: by rails first those of its rails in other nodes.
  DEEP_EP_DEVICE int turns() const { return this->num_nodes(); }
  DEEP_EP_DEVICE int owner_of_turn(int turn) const {
    if (turn + 1 == turns()) return this->common.rank;
    return this->rail_in((this->own_node() + 1 + turn) % this->num_nodes());
  }
  /// The row of `source` for `token` of `owner`, which is this rank or one that it relays for.
  DEEP_EP_DEVICE const std::byte* row_from(int owner, int source, int token) const {
    if (this->by_rails() && owner != this->common.rank) return row_at_relay(this->common.local, owner, source, token);
    return this->row_in(this->common.local, source, token, row_bytes);
  }
  /// By one thread: waits until the row's tags may be trusted, acquiring. At once where they always may. False: the row
  /// does not come.
  DEEP_EP_DEVICE bool await_row(int source, int token) const {
    return !this->is_far(source) || this->await_progress(source, token + 1, Wanted::low_latency_combine_rows);
  }
  /// Where the sum for a far owner's token goes, and row `index` for it; from there a poster takes it.
  DEEP_EP_DEVICE std::byte* staged_row(int owner, int index) const {
    return staged_place(owner, index).in(this->common.local);
  }
  DEEP_EP_DEVICE Place<std::byte> staged_place(int owner, int index) const {
    return this->common.staging.combine_row(this->epoch, owner, index, row_bytes);
  }
  /// Where a poster puts this rank's row for a token at its owner.
  DEEP_EP_DEVICE Place<std::byte> posted_to(int token) const {
    return this->common.window.row(kCombine, this->epoch, this->common.rank, token, row_bytes);
  }
  /// By a whole warp: its part of the sum is there. Releases it to the poster.
  DEEP_EP_DEVICE void hand_over_sum(int owner, int token, int warp) const {
    warp::sync();
    if (lane_index() == 0) store_release<Scope::system>(ready(owner, token, warp), this->epoch);
  }
  /// By a poster: a word of each warp that shares a staged row.
  DEEP_EP_DEVICE std::uint64_t* ready(int owner, int index, int warp) const {
    return this->common.staging.combine_ready(this->epoch, owner, index, warp).in(this->common.local);
  }

 private:
  /// By rails: where in the relay's heap the row of `member` of its node lies. A relay does not put its own into the
  /// window: that place is for the rows that the owner has for it.
  DEEP_EP_DEVICE std::byte* row_at_relay(std::byte* heap, int owner, int member, int token) const {
    const int node = this->node_of(owner);
    if (this->relay_of(owner) == member) {
      return this->common.staging.relayed_row(kCombine, this->epoch, node, token, row_bytes).in(heap);
    }
    const int width = this->common.rail_width;
    return this->row_in(heap, node * width + member % width, token, row_bytes);
  }
};

}  // namespace deep_ep::device::low_latency
