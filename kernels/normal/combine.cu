// Combine: for each token of this rank, the sum of the rows that its destination ranks hold. The way of a token's rows:
//
//   1. In each other node, a relaying warp of our rail adds up the rows of its node's ranks, which it reads in their
//      heaps, and stages the sum.
//   2. When a chunk of the staging ring is whole, a poster writes it into our landing ring (transfer.hpp).
//   3. An adding warp adds the rows of this node's ranks and the sums that have landed.
//
// In one node there is only step 3: kRails is false. Between nodes chunks go the other way than in dispatch: counts of
// rows are swapped.
//
// Rows that lie outside the heap are copied there first, if it has room. Otherwise their rank pushes them through local
// rings to the ranks of its node that add them. These add in the same order either way, so the result does not depend
// on it.
#include "kernels/common/row_copy.hpp"
#include "kernels/common/row_sum.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/normal/transfer.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::normal {

/// The handle counts the rows between this rank and `peer` so: equal at both, unless their handles are of different
/// dispatches.
struct RowsWithPeer {
  std::int32_t to_peer, from_peer;

  /// `index`, `own_index`: of the peer and of this rank in their node, which begins with `first`.
  DEEP_EP_DEVICE RowsWithPeer(const TransferParams& params, int first, int index, int own_index)
      : to_peer(params.end_of(first + own_index, index) - params.first_row_of(first + own_index, index)),
        from_peer(params.end_of(first + index, own_index) - params.first_row_of(first + index, own_index)) {}
};

template <bool kRails>
struct Combine : Transfer {
  static constexpr IntranodeSignal kSignal = IntranodeSignal::combine_done;
  static constexpr Wanted kEnd = Wanted::combine_done;

  const CombineParams& params;
  const NormalCombineShared& shared;
  const RowsWithPeer& with_first;  ///< what rows_with() says of the rank with this thread's index, if there is one

  DEEP_EP_DEVICE decltype(auto) grid() const { return grid_of<kRails>(transfer.common); }

  // 1. Ranks meet, and tell where their rows are.

  DEEP_EP_DEVICE RowsWithPeer rows_with(int index) const {
    return index == thread_index() ? with_first : RowsWithPeer(transfer, grid().first_of_node(), index, grid().index());
  }
  /// An offset of something that is missing, or not pulled, means nothing.
  DEEP_EP_DEVICE CombineAddresses ours(int index) const {
    const RowsWithPeer rows = rows_with(index);
    const auto offset = [&](const void* address) {
      return reinterpret_cast<std::uint64_t>(address) - reinterpret_cast<std::uint64_t>(own_heap());
    };
    return {.x = offset(params.shared_x),
            .topk_weights = offset(params.topk_weights),
            .num_rows = params.num_rows,
            .pulled = transfer.local_warps != 0 ? 0 : 1,
            .agreed = {static_cast<std::int32_t>(params.row_bytes), 0, params.num_topk, 0, 0, rows.from_peer,
                       rows.to_peer}};
  }
  DEEP_EP_DEVICE static void prepare() {}
  DEEP_EP_DEVICE bool learn(const Meeting& meeting, int index) {
    const int peer = grid().first_of_node() + index;
    CombineAddresses theirs;
    if (!meeting.hear(peer, theirs)) return false;
    fence<Scope::system>();  // the rows that the peer has written before are read by ordinary loads
    const RowsWithPeer rows = rows_with(index);
    const std::int32_t agreed[] = {
        static_cast<std::int32_t>(params.row_bytes), 0, params.num_topk, 0, 0, rows.to_peer, rows.from_peer};
    if (!meeting.agrees(agreed, theirs.agreed, peer)) return false;
    const std::byte* heap = transfer.common.heaps[peer];
    // Our own rows are read where they lie, also where no peer can read them.
    shared.ranks[index] = {.x = peer == grid().rank ? params.x : heap + theirs.x,
                           .topk_weights = reinterpret_cast<const float*>(heap + theirs.topk_weights),
                           .num_rows = theirs.num_rows,
                           .pushed = peer != grid().rank && theirs.pulled == 0};
    by_rings |= shared.ranks[index].pushed;
    return true;
  }

  // Rows that the ranks of this node hold of tokens of this rank, or of its rail in another node: row `n` that rank
  // `index` has of the tokens of our rail in `node`; -1: none.

  DEEP_EP_DEVICE std::int32_t row_of(int index, int node, std::int32_t n) const {
    return n + shared.first_rows[node * grid().width + index];
  }
  DEEP_EP_DEVICE bool is_held(int index, int node, std::int32_t n) const {
    return n >= 0 && row_of(index, node, n) < shared.ranks[index].num_rows;
  }
  DEEP_EP_DEVICE bool is_pushed(int index, int node, std::int32_t n) const {
    return by_rings && shared.ranks[index].pushed && is_held(index, node, n);
  }
  /// The word that says that it is there; without a word if it always is.
  DEEP_EP_DEVICE AwaitedWord awaited(int index, int node, std::int32_t n) const {
    return is_pushed(index, node, n) ? ring<kRails>(index, node).row(n) : AwaitedWord{};
  }
  /// A row that lies in a slot has its weights behind it.
  DEEP_EP_DEVICE FoundRow in_slot(const std::byte* slot) const {
    return {slot, reinterpret_cast<const float*>(slot + params.row_bytes)};
  }
  DEEP_EP_DEVICE FoundRow find(int index, int node, std::int32_t n) const {
    if (is_pushed(index, node, n)) return in_slot(ring<kRails>(index, node).slot(n));
    if (!is_held(index, node, n)) return {};
    const RankRows& rank = shared.ranks[index];
    const std::int64_t row = row_of(index, node, n);
    return {rank.x + row * params.row_bytes, rank.topk_weights + row * params.num_topk};
  }
  /// By one lane, when the whole warp has read it.
  DEEP_EP_DEVICE void release(int index, int node, std::int32_t n) const {
    if (is_pushed(index, node, n)) ring<kRails>(index, node).release(n);
  }

  // 2. A relaying warp adds by rank and in fp32, and rounds the sum once. What came from a node goes back to it.

  /// The number that row `relayed` has at rank `index` of this node, among those of its source; -1: none.
  DEEP_EP_DEVICE std::int32_t relayed_place(std::int64_t relayed, int index) const {
    if (index >= grid().width || relayed >= transfer.relay_rows_room) return -1;
    return load_stream(transfer.relay_rows + relayed * grid().width + index);
  }
  /// By one lane: what is not there yet of room in the staging ring, or else of pushed rows, the first.
  DEEP_EP_DEVICE AwaitedWord missing(int number, int row) const {
    const AwaitedWord room = stageable(number, rings().chunk_of(row));
    if (!room.is_reached()) return room;
    const std::int64_t at = relayed(transfer.counts.to_node, number, row);
    for (int index = 0; by_rings && index < grid().width; ++index) {
      const AwaitedWord part = awaited(index, grid().other(number), relayed_place(at, index));
      if (!part.is_reached()) return part;
    }
    return {};
  }
  DEEP_EP_DEVICE bool stage(int number, int row) const {
    const int node = grid().other(number);
    const std::int64_t at = relayed(transfer.counts.to_node, number, row);
    const auto find_row = [&](int index) {
      const std::int32_t place = relayed_place(at, index);
      return place < 0 ? FoundRow{} : find(index, node, place);
    };
    std::byte* to = rings().staging(number, row).in(own_heap());
    const RowReduction reduction(grid().width, find_row);
    reduction.add(to, params.row_bytes, {});
    if (params.num_topk != 0) {
      reduction.add_weights(reinterpret_cast<float*>(to + params.row_bytes), params.num_topk);
    }
    warp::sync();  // the lanes' stores come before the count, and all have read
    if (lane_index() == 0) count_staged(number, row);
    for (int index = lane_index(); by_rings && index < grid().width; index += kWarpSize) {
      release(index, node, relayed_place(at, index));
    }
    return true;
  }
  /// Stages this warp's rows, of n warps every n-th one of each node: so the first chunks are whole soon. False after a
  /// fault.
  DEEP_EP_DEVICE bool second(int warp) const {
    return serve(
        grid().others(), warp, transfer.second_warps,
        [&](int number) { return transfer.counts.to_node[grid().other(number)]; },
        [&](int number, int row) { return missing(number, row); },
        [&](int number, int row) { return stage(number, row); });
  }

  // 3. The adding warps. Each takes the next part of one of this rank's tokens and adds, in fp32 and in this order: the
  // biases; then node by node, for this node the rows that its ranks hold, by rank, and for another one the sum that
  // has landed from there. Rounded once more at the end. Warps take parts as they go: tokens have more or fewer rows,
  // and SMs differ in speed.
  //
  // A warp takes its parts in order, and ranks push, and rails stage, the rows of tokens in the same order. So some
  // warp is at the oldest part that is not added, and waits for rows that there is room for.

  // Contributions to a token, in the order in which they are added: a node's sum each, for this node its ranks' rows.

  DEEP_EP_DEVICE int contributions() const { return grid().others() + grid().width; }
  DEEP_EP_DEVICE int index_of(int at) const { return at - grid().node(); }  ///< of a rank of this node
  DEEP_EP_DEVICE bool is_local(int at) const { return !kRails || (index_of(at) >= 0 && index_of(at) < grid().width); }
  DEEP_EP_DEVICE int node_of(int at) const { return at < grid().node() ? at : at - grid().width + 1; }

  /// A token, and the lane's contribution to it: looked up before, as each look takes as long as loading a row.
  struct Token {
    int number;
    std::int32_t place;
  };

  /// The row's number at the rank, among ours, or that of the landed row; -1: none.
  DEEP_EP_DEVICE std::int32_t place_at(const Token& token, int at) const {
    return at < kWarpSize ? token.place : look_up(token.number, at);
  }
  DEEP_EP_DEVICE std::int32_t look_up(int token, int at) const {
    if (at >= contributions()) return -1;
    if constexpr (kRails) {
      if (!is_local(at)) return load_stream(transfer.node_row + std::int64_t{token} * grid().nodes() + node_of(at));
    }
    return load_stream(transfer.destination_row + std::int64_t{token} * grid().num_ranks + grid().first_of_node() +
                       index_of(at));
  }

  /// Waits until all that other nodes have of the token has landed, and all that is pushed is there. `known`: of which
  /// chunk of its node the lane knows that it has landed. False after a fault.
  DEEP_EP_DEVICE bool await(const Token& token, std::uint64_t& known) const {
    if (!kRails && !by_rings) return true;
    bool good = true;
    for (int at = lane_index(); at < contributions(); at += kWarpSize) {
      const std::int32_t place = place_at(token, at);
      if (place < 0) continue;
      AwaitedWord part;
      if (is_local(at)) {
        part = awaited(index_of(at), grid().node(), place);
      } else if constexpr (kRails) {
        part = landed(grid().number_of(node_of(at)), place);
        if (part.awaited.expected == known) continue;
      }
      good = part.await(policy()) && good;
      // The same lane asks for the same node again.
      if (!is_local(at) && contributions() <= kWarpSize) known = part.awaited.expected;
    }
    return warp::agree(good);
  }

  DEEP_EP_DEVICE void add(const Token& token, int part) const {
    const auto find_row = [&](int at) {
      const std::int32_t place = place_at(token, at);
      if (place < 0) return FoundRow{};
      if constexpr (kRails) {
        if (!is_local(at)) return in_slot(rings().landing(grid().number_of(node_of(at)), place).in(own_heap()));
      }
      return find(index_of(at), grid().node(), place);
    };
    const std::int64_t at = std::int64_t{token.number} * params.row_bytes;
    const auto bias_at = [&](int i) { return params.bias[i] == nullptr ? nullptr : params.bias[i] + at; };
    const RowReduction reduction(contributions(), find_row, bias_at(0), bias_at(1));
    reduction.add(params.combined_x + at, params.row_bytes, {part, params.parts_per_token});
    if (part != 0 || params.combined_weights == nullptr) return;
    reduction.add_weights(params.combined_weights + std::int64_t{token.number} * params.num_topk, params.num_topk);
  }

  /// The token's rows are read: counts those that have landed in their chunks, and releases those that were pushed,
  /// where others may wait for that. Then a token has one part.
  DEEP_EP_DEVICE void give_back(const Token& token) const {
    const bool releases = by_rings && transfer.num_tokens > transfer.local.slots;
    if (!kRails && !releases) return;
    warp::sync();  // by all lanes
    for (int at = lane_index(); at < contributions(); at += kWarpSize) {
      const std::int32_t place = place_at(token, at);
      if (place < 0) continue;
      if (is_local(at)) {
        if (releases) release(index_of(at), grid().node(), place);
      } else if constexpr (kRails) {
        count_read(grid().number_of(node_of(at)), place);
      }
    }
  }

  /// Adds parts of tokens until none is left. `helps`: the warp had other work before. False after a fault.
  DEEP_EP_DEVICE bool first(bool helps) const {
    const Divisor& parts = params.parts_per_token;
    const auto end = static_cast<std::uint32_t>(transfer.num_tokens * parts);
    const auto token_of = [&](std::uint32_t part) { return static_cast<int>(part) / parts; };
    const auto place_of = [&](std::uint32_t part) { return part < end ? look_up(token_of(part), lane_index()) : -1; };
    std::uint64_t known = 0;
    std::uint32_t* const drawn_parts = &transfer.common.state->pieces_drawn;
    const int warps = grid_blocks() * transfer.first_warps;
    Turns turns = helps ? Turns::of_late_warp(drawn_parts, end, warps)
                        : Turns::of_warp(drawn_parts, end, warps, number_in_grid(warp_index()));
    return turns.each(place_of(turns.turn), place_of, [&](std::int32_t place, std::int32_t) {
      const Token token{token_of(turns.turn), place};
      if (!await(token, known)) return false;
      add(token, static_cast<int>(turns.turn) % parts);
      give_back(token);
      return true;
    });
  }

  // 4. The pushing warps, on a rank whose rows the others do not read. They push rows in the order in which these add
  // them up, take any ring that has room, and never wait for one: its reader may wait for rows of another.

  DEEP_EP_DEVICE std::int32_t rows_by_ring(int source) const {
    return source % nodes().width == grid().index() ? 0 : rows_of(source, params.num_rows);
  }
  DEEP_EP_DEVICE static AwaitedWord word_of(const TokenRing& to, std::int32_t n) { return to.room(n); }
  DEEP_EP_DEVICE bool local(const TokenRing& to, std::int32_t n) const {
    const std::int64_t row = std::int64_t{transfer.first_row_of(to.here, grid().index())} + n;
    std::byte* const slot = to.slot_there(n);
    copy_row(slot, params.x + row * params.row_bytes, params.row_bytes);
    if (params.topk_weights != nullptr) {
      copy_words(slot + params.row_bytes, params.topk_weights + row * params.num_topk,
                 static_cast<std::uint32_t>(params.num_topk) * 4);
    }
    to.publish(n);
    return true;
  }
  DEEP_EP_DEVICE static void finish() {}
};

template <bool kRails>
DEEP_EP_DEVICE void combine_body(const CombineParams& params, std::byte* memory) {
  const TransferParams& transfer = params.transfer;
  const NormalParams& common = transfer.common;
  decltype(auto) grid = grid_of<kRails>(common);
  const NormalCombineShared shared{Carver(memory), transfer};
  // Loaded while the block finds out which call it is.
  const RowsWithPeer with_first(transfer, grid.first_of_node(), thread_index() < grid.width ? thread_index() : 0,
                                grid.index());
  const Call call = Call::begin(kRails ? common.state->transfer : common.state->combine, common.wait);
  Combine<kRails> combine{{transfer, call.epoch, shared.next_of_warp()}, params, shared, with_first};
  transfer_rows<kRails>(combine, call, {common, Wanted::combine_addresses, MeetingKind::combine, call.epoch});
}

}  // namespace deep_ep::device::normal

DEEP_EP_DEFINE_KERNEL(combine, deep_ep::device::normal::combine_body<false>)
DEEP_EP_DEFINE_KERNEL(combine_and_notify_internode, deep_ep::device::normal::combine_body<true>)
