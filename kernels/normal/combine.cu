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
// A rank whose rows lie outside the heap pushes them through local rings to the ranks of its node that add them
// (combine_push.hpp). These add in the same order either way, so the result does not depend on it.
#include "kernels/common/row_comparison.hpp"
#include "kernels/common/row_sum.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/normal/combine_push.hpp"
#include "kernels/normal/meet.hpp"
#include "kernels/normal/transfer.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::normal {

/// Rows that the ranks of this node hold of tokens of this rank, or of its rail in another node.
template <bool kRails>
struct LocalRows {
  const CombineParams& params;
  const NodeRows* ranks;  ///< [width]
  std::uint64_t epoch;
  bool by_rings;  ///< some rank of this node pushes its rows
  bool releases;  ///< and waits for room for some of our tokens' rows

  DEEP_EP_DEVICE LocalRows(const CombineParams& combine, const NodeRows* node_ranks, std::uint64_t call_epoch)
      : params(combine), ranks(node_ranks), epoch(call_epoch), by_rings(false), releases(false) {
    for (int index = lane_index(); index < grid().width; index += kWarpSize) {
      by_rings |= ranks[index].pushed;
      releases |= ranks[index].pushed && ranks[index].our_rows > params.transfer.local.slots;
    }
    by_rings = warp::any(by_rings);
    releases = warp::any(releases);
  }

  DEEP_EP_DEVICE decltype(auto) grid() const { return grid_of<kRails>(params.transfer.common); }

  // Of row `n` that rank `index` has of the tokens of our rail in `node`; -1: of none.

  DEEP_EP_DEVICE bool is_ours(int node) const { return !kRails || node == grid().node(); }
  DEEP_EP_DEVICE std::int32_t row_of(int index, int node, std::int32_t n) const {
    return n + (is_ours(node) ? ranks[index].first_row : params.transfer.first_row_of(grid().rail_in(node), index));
  }
  DEEP_EP_DEVICE bool is_held(int index, int node, std::int32_t n) const {
    return n >= 0 && row_of(index, node, n) < ranks[index].num_rows;
  }
  DEEP_EP_DEVICE bool is_pushed(int index, int node, std::int32_t n) const {
    return by_rings && ranks[index].pushed && is_held(index, node, n);
  }
  DEEP_EP_DEVICE TokenRing ring(int index, int node) const {
    return combine_ring<kRails>(params.transfer, epoch, index, node, is_ours(node) ? ranks[index].our_rows : INT32_MAX);
  }

  /// The word that says that it is there; without a word if it always is.
  DEEP_EP_DEVICE AwaitedWord awaited(int index, int node, std::int32_t n) const {
    return is_pushed(index, node, n) ? ring(index, node).row(n) : AwaitedWord{};
  }
  /// A row that lies in a slot has its weights behind it.
  DEEP_EP_DEVICE FoundRow in_slot(const std::byte* slot) const {
    return {slot, reinterpret_cast<const float*>(slot + params.row_bytes)};
  }
  DEEP_EP_DEVICE FoundRow find(int index, int node, std::int32_t n) const {
    if (is_pushed(index, node, n)) return in_slot(ring(index, node).slot(n));
    if (!is_held(index, node, n)) return {};
    const std::int64_t row = row_of(index, node, n);
    return {ranks[index].x + row * params.row_bytes, ranks[index].topk_weights + row * params.num_topk};
  }
  /// By one lane, when the whole warp has read it.
  DEEP_EP_DEVICE void release(int index, int node, std::int32_t n) const {
    if (is_pushed(index, node, n)) ring(index, node).release(n);
  }
};

/// By a relaying warp: adds by rank and in fp32, and rounds the sum once.
struct CombineRelay {
  const LocalRows<true>& local;
  std::int32_t* next;  ///< [other nodes], of the warp

  DEEP_EP_DEVICE const CombineParams& params() const { return local.params; }
  DEEP_EP_DEVICE const TransferParams& transfer() const { return local.params.transfer; }
  DEEP_EP_DEVICE const NodeGrid& grid() const { return local.grid(); }
  DEEP_EP_DEVICE const Rings& rings() const { return transfer().rings; }
  /// In combine, what came from a node goes back to it.
  DEEP_EP_DEVICE int rows_for(int number) const { return transfer().counts.to_node[grid().other(number)]; }
  DEEP_EP_DEVICE std::int64_t relayed(int number, int row) const {
    return rows_before(grid(), transfer().counts.to_node, number) + row;
  }

  /// The number that row `relayed` has at rank `index` of this node, among those of its source; -1: none.
  DEEP_EP_DEVICE std::int32_t place_at(std::int64_t relayed, int index) const {
    if (index >= grid().width || relayed >= transfer().relay_rows_room) return -1;
    return load_stream(params().relay_rows + relayed * grid().width + index);
  }
  /// By one lane: what is not there yet of room in the staging ring, or else of pushed rows, the first.
  DEEP_EP_DEVICE AwaitedWord missing(int number, int row) const {
    const AwaitedWord room = stageable(transfer(), local.epoch - 1, number, rings().chunk_of(row));
    if (!room.is_reached()) return room;
    const std::int64_t at = relayed(number, row);
    for (int index = 0; local.by_rings && index < grid().width; ++index) {
      const AwaitedWord part = local.awaited(index, grid().other(number), place_at(at, index));
      if (!part.is_reached()) return part;
    }
    return {};
  }

  DEEP_EP_DEVICE void stage(int number, int row) const {
    const int node = grid().other(number);
    const std::int64_t at = relayed(number, row);
    const auto find = [&](int index) {
      const std::int32_t place = place_at(at, index);
      return place < 0 ? FoundRow{} : local.find(index, node, place);
    };
    std::byte* to = rings().staging(number, row).in(transfer().common.own_heap());
    const RowReduction reduction(grid().width, find);
    reduction.add(to, params().row_bytes, {});
    if (params().num_topk != 0) {
      reduction.add_weights(reinterpret_cast<float*>(to + params().row_bytes), params().num_topk);
    }
    warp::sync();  // the lanes' stores come before the count, and all have read
    if (lane_index() == 0) {
      add_release<Scope::gpu>(&transfer().chunk_state(number, rings().chunk_of(row)).staged, std::uint32_t{1});
    }
    for (int index = lane_index(); local.by_rings && index < grid().width; index += kWarpSize) {
      local.release(index, node, place_at(at, index));
    }
  }

  /// Stages this warp's rows, which are every `parts`th one of each node: so the first chunks are whole soon. False
  /// after a fault.
  DEEP_EP_DEVICE bool stage_all(int first, int parts) const {
    return serve(
        grid().others(), ReportLate{transfer().wait}, next, first, parts, [&](int number) { return rows_for(number); },
        [&](int number, int row) { return missing(number, row); },
        [&](int number, int row) {
          stage(number, row);
          return true;
        },
        [] {});
  }
};

// The adding warps of combine. Each takes the next part of one of this rank's tokens and adds, in fp32 and in this
// order: the biases; then node by node, for this node the rows that its ranks hold, by rank, and for another one the
// sum that has landed from there. Rounded once more at the end. Warps take parts as they go: tokens have more or fewer
// rows, and SMs differ in speed.
//
// A warp takes its parts in order, and ranks push, and rails stage, the rows of tokens in the same order. So some warp
// is at the oldest part that is not added, and waits for rows that there is room for.

template <bool kRails>
struct CombineAdder {
  const LocalRows<kRails>& local;
  ReportLate policy;

  DEEP_EP_DEVICE const CombineParams& params() const { return local.params; }
  DEEP_EP_DEVICE const TransferParams& transfer() const { return local.params.transfer; }
  DEEP_EP_DEVICE decltype(auto) grid() const { return local.grid(); }
  DEEP_EP_DEVICE const Rings& rings() const { return transfer().rings; }

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
      if (!is_local(at)) return load_stream(transfer().node_row + std::int64_t{token} * grid().nodes() + node_of(at));
    }
    return load_stream(transfer().destination_row + std::int64_t{token} * grid().num_ranks + grid().first_of_node() +
                       index_of(at));
  }

  /// Waits until all that other nodes have of the token has landed, and all that is pushed is there. `landed`: of which
  /// chunk of its node the lane knows that. False after a fault.
  DEEP_EP_DEVICE bool await(const Token& token, std::uint64_t& landed) const {
    bool good = true;
    for (int at = lane_index(); at < contributions(); at += kWarpSize) {
      const std::int32_t place = place_at(token, at);
      if (place < 0) continue;
      AwaitedWord part;
      if (is_local(at)) {
        part = local.awaited(index_of(at), grid().node(), place);
      } else if constexpr (kRails) {
        part = landed_through(transfer(), local.epoch - 1, grid().number_of(node_of(at)), rings().chunk_of(place));
        if (part.awaited.expected == landed) continue;
      }
      if (part.word == nullptr) continue;
      good = part.await(policy) && good;
      // The same lane asks for the same node again.
      if (!is_local(at) && contributions() <= kWarpSize) landed = part.awaited.expected;
    }
    return warp::agree(good);
  }

  /// The row of a bias that begins `at` bytes into it; nullptr: there is none.
  DEEP_EP_DEVICE const std::byte* bias_of(int number, std::int64_t at) const {
    return params().bias[number] == nullptr ? nullptr : params().bias[number] + at;
  }

  DEEP_EP_DEVICE void add(const Token& token, int part) const {
    const auto find = [&](int at) {
      const std::int32_t place = place_at(token, at);
      if (place < 0) return FoundRow{};
      if constexpr (kRails) {
        if (!is_local(at)) {
          const Place landed = rings().landing(grid().number_of(node_of(at)), place);
          return local.in_slot(landed.in(transfer().common.own_heap()));
        }
      }
      return local.find(index_of(at), grid().node(), place);
    };
    const std::int64_t at = std::int64_t{token.number} * params().row_bytes;
    const RowReduction reduction(contributions(), find, bias_of(0, at), bias_of(1, at));
    reduction.add(params().combined_x + at, params().row_bytes,
                  {static_cast<std::uint32_t>(part) * RowSum::kPieceBytes,
                   static_cast<std::uint32_t>(params().parts_per_token) * RowSum::kPieceBytes});
    if (part != 0 || params().combined_weights == nullptr) return;
    reduction.add_weights(params().combined_weights + std::int64_t{token.number} * params().num_topk,
                          params().num_topk);
  }

  /// The token's rows are read: counts those that have landed in their chunks, and releases those that were pushed,
  /// where others wait for that. Then a token has one part.
  DEEP_EP_DEVICE void count_read(const Token& token) const {
    if (!kRails && !local.releases) return;
    warp::sync();  // by all lanes
    for (int at = lane_index(); at < contributions(); at += kWarpSize) {
      const std::int32_t place = place_at(token, at);
      if (place < 0) continue;
      if (is_local(at)) {
        local.release(index_of(at), grid().node(), place);
      } else if constexpr (kRails) {
        ChunkState& chunk = transfer().chunk_state(grid().number_of(node_of(at)), rings().chunk_of(place));
        add_release<Scope::gpu>(&chunk.read, std::uint32_t{1});
      }
    }
  }

  /// Adds parts of tokens until none is left. `helps`: the warp had other work before. False after a fault.
  DEEP_EP_DEVICE bool add_all(bool helps) const {
    const auto parts_of_token = static_cast<std::uint32_t>(params().parts_per_token);
    const std::uint32_t end = static_cast<std::uint32_t>(transfer().num_tokens) * parts_of_token;
    const auto token_of = [&](std::uint32_t part) { return static_cast<int>(part / parts_of_token); };
    const auto place_of = [&](std::uint32_t part) { return part < end ? look_up(token_of(part), lane_index()) : -1; };
    std::uint64_t landed = 0;
    std::uint32_t* const drawn_parts = &transfer().common.state->next_piece;
    const int warps = grid_blocks() * transfer().first_warps;
    Turns turns = helps ? Turns::of_late_warp(drawn_parts, end, warps)
                        : Turns::of_warp(drawn_parts, end, warps, warp_index() * grid_blocks() + block_index());
    std::int32_t place = place_of(turns.turn);
    while (!turns.over()) {
      // Nobody looks at these two before this part is done.
      const std::uint32_t drawn = turns.draw();
      const std::int32_t place_next = place_of(turns.following);
      const Token token{token_of(turns.turn), place};
      if (!await(token, landed)) return false;
      add(token, static_cast<int>(turns.turn % parts_of_token));
      count_read(token);
      turns.advance(drawn);
      place = place_next;
    }
    return true;
  }
};

/// What the handle says of the rows between this rank and `peer`: equal at both, unless their handles are of different
/// dispatches.
struct RowsWithPeer {
  std::int32_t to_peer, from_peer;
  std::int32_t first_row;  ///< of the peer's rows, that is of a token of this rank

  /// `index`, `own_index`: of the peer and of this rank in their node, which begins with `first`.
  DEEP_EP_DEVICE RowsWithPeer(const TransferParams& params, int first, int index, int own_index)
      : first_row(params.first_row_of(first + own_index, index)) {
    to_peer = params.end_of(first + own_index, index) - first_row;
    from_peer = params.end_of(first + index, own_index) - params.first_row_of(first + index, own_index);
  }
};

/// Our rows. An offset of something that is missing, or not pulled, means nothing.
DEEP_EP_DEVICE CombineAddresses own_addresses(const CombineParams& params, const RowsWithPeer& rows) {
  const auto offset = [&](const void* address) {
    return reinterpret_cast<std::uint64_t>(address) -
           reinterpret_cast<std::uint64_t>(params.transfer.common.own_heap());
  };
  return {
      .x = offset(params.x),
      .topk_weights = offset(params.topk_weights),
      .num_rows = params.num_rows,
      .pulled = params.transfer.local_warps != 0 ? 0 : 1,
      .agreed = {static_cast<std::int32_t>(params.row_bytes), 0, params.num_topk, 0, 0, rows.from_peer, rows.to_peer}};
}

/// Waits for what rank `peer` of this node says of its rows. False after a fault.
DEEP_EP_DEVICE bool learn_rows(const CombineParams& params, const Meeting& meeting, int peer, const RowsWithPeer& rows,
                               NodeRows& rank) {
  CombineAddresses theirs;
  if (!meeting.hear(peer, theirs)) return false;
  fence<Scope::system>();  // the rows that the peer has written before are read by ordinary loads
  const std::int32_t agreed[] = {
      static_cast<std::int32_t>(params.row_bytes), 0, params.num_topk, 0, 0, rows.to_peer, rows.from_peer};
  if (!meeting.agrees(agreed, theirs.agreed, peer)) return false;
  const std::byte* heap = meeting.common.heaps[peer];
  const std::int32_t end = rows.first_row + rows.to_peer;
  // Our own rows are read where they lie, also where no peer can read them.
  rank = {.x = heap + theirs.x,
          .topk_weights = reinterpret_cast<const float*>(heap + theirs.topk_weights),
          .num_rows = theirs.num_rows,
          .first_row = rows.first_row,
          .our_rows = (end < theirs.num_rows ? end : theirs.num_rows) - rows.first_row,
          .pushed = peer != meeting.common.rank && theirs.pulled == 0};
  return true;
}

template <bool kRails>
DEEP_EP_DEVICE void combine_body(const CombineParams& params, std::byte* memory) {
  const TransferParams& transfer = params.transfer;
  const NormalParams& common = transfer.common;
  decltype(auto) grid = grid_of<kRails>(common);
  const ReportLate policy{transfer.wait};
  const CombineShared shared(Carver(memory), transfer, grid_blocks());
  // Loaded while the block finds out which call it is.
  const auto look_up = [&](int index) { return RowsWithPeer(transfer, grid.first_of_node(), index, grid.index()); };
  const RowsWithPeer rows_with_first = look_up(thread_index() < grid.width ? thread_index() : 0);
  const auto rows_with = [&](int index) { return index == thread_index() ? rows_with_first : look_up(index); };
  const Call call = Call::begin(kRails ? common.state->transfer : common.state->combine, transfer.wait);
  const Meeting meeting{common, policy, Wanted::combine_addresses, MeetingKind::combine, call.epoch};
  const int local_warp = warp_index() - transfer.moving_warps();
  CombinePusher<kRails> pusher{params,
                               policy,
                               call.epoch,
                               shared.local_rows,
                               shared.local_next + local_warp * grid.num_ranks,
                               {shared.pipes.pipe(local_warp), shared.pieces[local_warp]}};
  bool good = call.begun;
  if (good) {
    // 1. Publish where our rows are. That this kernel runs also says that they are written, and that our rings are
    // free.
    if (block_index() == 0) {
      for (int index = thread_index(); index < grid.width; index += block_threads()) {
        meeting.tell(grid.first_of_node() + index, own_addresses(params, rows_with(index)));
      }
    }
    if (local_warp >= 0 && local_warp < transfer.pushing_warps() && lane_index() == 0) pusher.pipe.init();

    for (int ring = thread_index(); transfer.local_warps != 0 && ring < pusher.rings(); ring += block_threads()) {
      shared.local_rows[ring] = pusher.rows_of(ring);
    }

    // 2. Learn the same of the others of this node.
    for (int index = thread_index(); index < grid.width; index += block_threads()) {
      good = learn_rows(params, meeting, grid.first_of_node() + index, rows_with(index), shared.ranks[index]) && good;
    }
    good = block::all(good);
  }

  // 3. Add for ourselves, add for our rails, push, post.
  if (good) {
    const LocalRows<kRails> local(params, shared.ranks, call.epoch);
    good = do_roles<kRails>(
        transfer, call.epoch - 1, shared,
        [&](bool helps) {
          return CombineAdder<kRails>{local, policy}.add_all(helps);
        },
        [&](int part, int parts) {
          if constexpr (!kRails)
            return true;
          else
            return CombineRelay{local, shared.next + warp_index() * grid.others()}.stage_all(part, parts);
        },
        [&](int warp) {
          const int pushing = transfer.pushing_warps();
          const int blocks = params.pushing_blocks < grid_blocks() ? params.pushing_blocks : grid_blocks();
          if (block_index() >= blocks) return true;
          if (warp < pushing) return pusher.push_all(warp * blocks + block_index(), pushing * blocks);
          raise_words(shared.pieces, pushing);
          return true;
        });
    good = block::all(good);
  }

  // 4. The last block signals to the node that its rows have been read, and waits for the same signal.
  call.end([&] {
    if (good) {
      end_together<kRails>(transfer, policy, IntranodeSignal::combine_done, Wanted::combine_done, call.epoch);
    }
  });
}

}  // namespace deep_ep::device::normal

DEEP_EP_DEFINE_KERNEL(combine, deep_ep::device::normal::combine_body<false>)
DEEP_EP_DEFINE_KERNEL(combine_and_notify_internode, deep_ep::device::normal::combine_body<true>)
