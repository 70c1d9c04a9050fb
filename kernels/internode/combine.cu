// Combine between nodes: for each token of this rank, the sum of the rows that its destination ranks hold. The way of a
// token's rows:
//
//   1. In each other node, a relaying warp of our rail adds up the rows of its node's ranks, which it reads in their
//      heaps, and stages the sum.
//   2. When a chunk of the staging ring is whole, a poster writes it into our landing ring (posting.hpp).
//   3. An adding warp adds the rows of this node's ranks and the sums that have landed.
//
// A rank whose rows lie outside the heap pushes them through local rings to the ranks of its node that add them.
// Chunks go the other way than in dispatch: counts of rows are swapped.
#include "kernels/common/row_comparison.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/internode/combine_rows.hpp"
#include "kernels/internode/posting.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::internode {

// The relaying warps of combine: for a token of their rail in another node, they add up what the ranks of this node
// hold, by rank and in fp32, and stage the sum, rounded once, as the one row that crosses the network.

struct CombineRelay {
  const LocalRows& local;
  std::int32_t* next;  ///< [other nodes], of the warp

  DEEP_EP_DEVICE const InternodeCombineParams& params() const { return local.params; }
  DEEP_EP_DEVICE const TransferParams& transfer() const { return local.params.transfer; }
  DEEP_EP_DEVICE const NodeGrid& grid() const { return local.grid(); }
  DEEP_EP_DEVICE const Rings& rings() const { return transfer().rings; }
  /// In combine, what came from a node goes back to it.
  DEEP_EP_DEVICE int rows_for(int number) const { return transfer().counts.to_node[grid().other(number)]; }
  DEEP_EP_DEVICE std::int64_t relayed(int number, int row) const {
    return rows_before(grid(), transfer().counts.to_node, number) + row;
  }

  /// The row that rank `index` of this node has of row number `relayed`; -1: none.
  DEEP_EP_DEVICE std::int32_t place_at(std::int64_t relayed, int index) const {
    if (index >= grid().width || relayed >= transfer().relay_rows_room) return -1;
    return load_stream(params().relay_rows + relayed * grid().width + index);
  }
  /// By one lane: the first of the pushed rows that is not there yet. Without a word if all are: then the warp waits
  /// for room in the staging ring, that is for the posters, or for a warp that waits with an earlier row.
  DEEP_EP_DEVICE AwaitedWord missing(int number, int row) const {
    const std::int64_t at = relayed(number, row);
    for (int index = 0; local.by_rings && index < grid().width; ++index) {
      const AwaitedWord part = local.awaited(index, grid().other(number), place_at(at, index));
      if (part.word != nullptr && !part.is_reached()) return part;
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
    if (!local.by_rings) return;
    warp::sync();  // all lanes have read
    for (int index = lane_index(); index < grid().width; index += kWarpSize) {
      local.release(index, node, place_at(at, index));
    }
  }

  // A warp takes two rows of a chunk at a time, so that one fence serves for both; and one where ranks push, as two may
  // not fit their rings at once.

  DEEP_EP_DEVICE int share_rows() const { return local.by_rings ? 1 : Rings::kShareRows; }
  DEEP_EP_DEVICE const Divisor& shares_of_chunk() const { return local.by_rings ? rings().chunk_rows : rings().shares; }
  DEEP_EP_DEVICE int chunk_of(int share) const { return share / shares_of_chunk(); }
  DEEP_EP_DEVICE int first_row(int share) const {
    return chunk_of(share) * rings().chunk_rows + share % shares_of_chunk() * share_rows();
  }

  /// Of so many rows: none is empty, as no rank would push it.
  DEEP_EP_DEVICE int shares_of(int rows) const {
    const int chunks = rings().chunk_of(rows);
    const int rest = rows - chunks * rings().chunk_rows;
    return chunks * shares_of_chunk() + (rest + share_rows() - 1) / share_rows();
  }

  DEEP_EP_DEVICE void stage_share(int number, int share) const {
    const int chunk = chunk_of(share);
    const int first = first_row(share);
    const int left = chunk * rings().chunk_rows + rings().rows_in(chunk, rows_for(number)) - first;
    const int rows = left < share_rows() ? left : share_rows();
#pragma unroll 1
    for (int row = first; row < first + rows; ++row) stage(number, row);
    warp::sync();  // the lanes' stores come before the count
    if (lane_index() == 0) {
      add_release<Scope::gpu>(transfer().common.staged + rings().counter(number, chunk),
                              static_cast<std::uint32_t>(rows));
    }
  }

  /// Stages this warp's shares, which are every `step`th one of each node: so the first chunks are whole soon. False
  /// after a fault. If no rank pushes, the warp waits for the posters only, which know for which rank they wait, and
  /// for how long.
  DEEP_EP_DEVICE bool stage_all(int first, int step) const {
    return serve(
        grid().others(), transfer().wait, next, first, step, [&](int number) { return shares_of(rows_for(number)); },
        [&](int number) {
          return is_stageable(transfer(), local.call, number, chunk_of(next[number])) &&
                 missing(number, first_row(next[number])).word == nullptr;
        },
        [&](int number, int share) {
          stage_share(number, share);
          return true;
        },
        [&](int number, int share) { return missing(number, first_row(share)); });
  }
};

// The adding warps of combine. Each takes the next of this rank's tokens and adds, in fp32 and in this order: the
// biases; then node by node, for this node the rows that its ranks hold, by rank, and for another one the sum that has
// landed from there. Rounded once more at the end.
//
// Tokens are taken in order, and a rail stages the rows of its node in the same order. So the oldest token that waits
// for a row waits for one that there is room for.

struct CombineAdder {
  const LocalRows& local;

  DEEP_EP_DEVICE const InternodeCombineParams& params() const { return local.params; }
  DEEP_EP_DEVICE const TransferParams& transfer() const { return local.params.transfer; }
  DEEP_EP_DEVICE const NodeGrid& grid() const { return local.grid(); }
  DEEP_EP_DEVICE const Rings& rings() const { return transfer().rings; }

  // Contributions to a token, in the order in which they are added: a node's sum each, for this node its ranks' rows.

  DEEP_EP_DEVICE int contributions() const { return grid().others() + grid().width; }
  DEEP_EP_DEVICE int index_of(int at) const { return at - grid().node(); }  ///< of a rank of this node
  DEEP_EP_DEVICE bool is_local(int at) const { return index_of(at) >= 0 && index_of(at) < grid().width; }
  DEEP_EP_DEVICE int node_of(int at) const { return at < grid().node() ? at : at - grid().width + 1; }

  /// A token, and the lane's contribution to it: looked up once, as each look takes as long as loading a row.
  struct Token {
    int number;
    std::int32_t place;
  };

  /// The rank's row, or the number of the landed row; -1: none.
  DEEP_EP_DEVICE std::int32_t place_at(const Token& token, int at) const {
    return at < kWarpSize ? token.place : look_up(token.number, at);
  }
  DEEP_EP_DEVICE std::int32_t look_up(int token, int at) const {
    if (at >= contributions()) return -1;
    if (!is_local(at)) return load_stream(transfer().node_row + std::int64_t{token} * grid().nodes() + node_of(at));
    return load_stream(transfer().destination_row + std::int64_t{token} * grid().num_ranks + grid().first_of_node() +
                       index_of(at));
  }

  /// Waits until all that other nodes have of the token has landed, and all that is pushed is there. `landed`: how far
  /// the lane knows that its node's chunks have come. False after a fault.
  DEEP_EP_DEVICE bool await(const Token& token, std::uint64_t& landed) const {
    bool good = true;
    for (int at = lane_index(); at < contributions(); at += kWarpSize) {
      const std::int32_t place = place_at(token, at);
      if (place < 0) continue;
      const bool here = is_local(at);
      const AwaitedWord part =
          here ? local.awaited(index_of(at), grid().node(), place)
               : landed_through(transfer(), local.call, grid().number_of(node_of(at)), rings().chunk_of(place));
      if (part.word == nullptr || part.awaited.expected <= landed) continue;
      good = part.await(transfer().wait) && good;
      // The same lane asks for the same node again.
      if (!here && rings().lanes == 1 && contributions() <= kWarpSize) landed = load_acquire<Scope::system>(part.word);
    }
    return warp::agree(good);
  }

  /// The row of a bias that begins `at` bytes into it; nullptr: there is none.
  DEEP_EP_DEVICE const std::byte* bias_of(int number, std::int64_t at) const {
    return params().bias[number] == nullptr ? nullptr : params().bias[number] + at;
  }

  DEEP_EP_DEVICE void add(const Token& token) const {
    const auto find = [&](int at) {
      const std::int32_t place = place_at(token, at);
      if (place < 0) return FoundRow{};
      if (is_local(at)) return local.find(index_of(at), grid().node(), place);
      const Place landed = rings().landing(grid().number_of(node_of(at)), place);
      return local.in_slot(landed.in(transfer().common.own_heap()));
    };
    const std::int64_t at = std::int64_t{token.number} * params().row_bytes;
    const RowReduction reduction(contributions(), find, bias_of(0, at), bias_of(1, at));
    reduction.add(params().combined_x + at, params().row_bytes, {});
    if (params().combined_weights == nullptr) return;
    reduction.add_weights(params().combined_weights + std::int64_t{token.number} * params().num_topk,
                          params().num_topk);
  }

  /// The token's rows are read: counts those that have landed in their chunks, and releases those that were pushed.
  DEEP_EP_DEVICE void count_read(const Token& token) const {
    warp::sync();  // by all lanes
    for (int at = lane_index(); at < contributions(); at += kWarpSize) {
      const std::int32_t place = place_at(token, at);
      if (place < 0) continue;
      if (is_local(at)) {
        local.release(index_of(at), grid().node(), place);
        continue;
      }
      const int counter = rings().counter(grid().number_of(node_of(at)), rings().chunk_of(place));
      add_release<Scope::gpu>(transfer().common.read + counter, std::uint32_t{1});
    }
  }

  /// Adds tokens until none is left. False after a fault.
  DEEP_EP_DEVICE bool add_all() const {
    std::uint64_t landed = 0;
    for (;;) {
      const auto number = static_cast<int>(take_next(&transfer().common.state->next_token));
      if (number >= transfer().num_tokens) return true;
      const Token token{number, look_up(number, lane_index())};
      if (!await(token, landed)) return false;
      add(token);
      count_read(token);
    }
  }
};

// The pushing warps of combine, on a rank whose rows lie outside the heap: they store them in the local rings of the
// ranks of their node, in the order in which these add them up. They take any ring that has room and never wait for
// one ring: its reader may wait for rows of another.

/// Rings are numbered by the index of their reader, then by the node of its rail whose tokens the rows are of.
struct CombinePusher {
  const InternodeCombineParams& params;
  std::uint64_t call;
  const std::int32_t* rows;  ///< [num_ranks]: how many go by each ring
  std::int32_t* next;        ///< [num_ranks], of the warp

  DEEP_EP_DEVICE const NodeGrid& grid() const { return params.transfer.common.grid; }
  DEEP_EP_DEVICE TokenRing ring(int number) const {
    return LocalRows::ring(params, call, number / grid().nodes(), number % grid().nodes());
  }
  DEEP_EP_DEVICE int source_of(int number) const {
    return number % grid().nodes() * grid().width + number / grid().nodes();
  }
  /// The first of our rows that goes by a ring: those of one source follow each other, by token.
  DEEP_EP_DEVICE std::int32_t first_row(int number) const {
    return LocalRows::first_row(params, source_of(number), grid().rank);
  }

  DEEP_EP_DEVICE std::int32_t rows_of(int number) const {
    const std::int32_t begin = first_row(number);
    const std::int32_t end = params.rank_prefix_matrix[source_of(number) * grid().num_ranks + grid().rank];
    const std::int32_t held = end < params.num_rows ? end : params.num_rows;
    return begin < held ? held - begin : 0;
  }

  DEEP_EP_DEVICE void push(int number, std::int32_t n) const {
    const std::int64_t row = std::int64_t{first_row(number)} + n;
    std::byte* slot = ring(number).slot_there(n);
    copy_row(slot, params.x + row * params.row_bytes, params.row_bytes);
    if (lane_index() < params.num_topk) {
      reinterpret_cast<float*>(slot + params.row_bytes)[lane_index()] =
          load_weak(params.topk_weights + row * params.num_topk + lane_index());
    }
    ring(number).publish(n);
  }

  /// Pushes this warp's rows, which are every `step`th one of each ring. False after a fault.
  DEEP_EP_DEVICE bool push_all(int first, int step) const {
    return serve(
        grid().num_ranks, params.transfer.wait, next, first, step, [&](int number) { return rows[number]; },
        [&](int number) { return ring(number).has_room(next[number]); },
        [&](int number, std::int32_t n) {
          push(number, n);
          return true;
        },
        [&](int number, std::int32_t n) { return ring(number).room(n); });
  }
};

/// The rows from `source` to `destination`, as the handle has them: equal at both, unless their handles differ.
DEEP_EP_DEVICE std::int32_t rows_between(const InternodeCombineParams& params, int source, int destination) {
  return deep_ep::rows_between(params.rank_prefix_matrix, params.transfer.common.grid.num_ranks, source, destination);
}

/// Publishes to rank `index` of this node where our rows are.
DEEP_EP_DEVICE void publish_rows(const InternodeCombineParams& params, std::uint64_t epoch, int index) {
  const InternodeParams& common = params.transfer.common;
  const auto offset = [&](const void* address) {
    return address == nullptr ? 0
                              : static_cast<std::uint64_t>(static_cast<const std::byte*>(address) - common.own_heap());
  };
  const bool pushed = params.transfer.local_warps != 0;
  Mailbox<CombineAddresses>& box = common.window.combine_box(common.heap_of(index), common.grid.index());
  box.message = {.x = pushed ? 0 : offset(params.x),
                 .topk_weights = pushed ? 0 : offset(params.topk_weights),
                 .window = 0,  // that of other ranks is somewhere else
                 .window_stride = 0,
                 .window_tokens = 0,
                 .tokens_per_round = 0,
                 .num_tokens = 0,
                 .num_rows = params.num_rows,
                 .pulled = !pushed,
                 .row_bytes = params.row_bytes,
                 .num_topk = params.num_topk,
                 .rows_to_reader = rows_between(params, common.grid.rank, common.grid.first_of_node() + index),
                 .rows_from_reader = rows_between(params, common.grid.first_of_node() + index, common.grid.rank)};
  store_release<Scope::system>(&box.signal, epoch);
}

/// Waits for what rank `index` of this node publishes. False after a fault.
DEEP_EP_DEVICE bool learn_rows(const InternodeCombineParams& params, std::uint64_t epoch, int index, NodeRows& rank) {
  const TransferParams& transfer = params.transfer;
  const InternodeParams& common = transfer.common;
  const Mailbox<CombineAddresses>& box = common.window.combine_box(common.own_heap(), index);
  const Awaited addresses{common.grid.first_of_node() + index, Wanted::combine_addresses, epoch};
  if (!wait_signal(transfer.wait, &box.signal, addresses)) return false;
  const CombineAddresses& theirs = box.message;
  RowComparison rows_of_both;
  rows_of_both.compare(RowField::row_bytes, params.row_bytes, theirs.row_bytes);
  rows_of_both.compare(RowField::num_topk, params.num_topk, theirs.num_topk);
  rows_of_both.compare(RowField::rows_to_peer, rows_between(params, common.grid.rank, addresses.peer),
                       theirs.rows_from_reader);
  rows_of_both.compare(RowField::rows_from_peer, rows_between(params, addresses.peer, common.grid.rank),
                       theirs.rows_to_reader);
  const std::uint64_t* own = &common.window.combine_box(common.own_heap(), common.grid.index()).signal;
  if (!rows_of_both.agrees(transfer.wait, own, common.grid.rank, addresses)) return false;
  const std::byte* heap = common.heap_of(index);
  rank = {.x = heap + theirs.x,
          .topk_weights = reinterpret_cast<const float*>(heap + theirs.topk_weights),
          .num_rows = theirs.num_rows,
          .pushed = !theirs.pulled};
  return true;
}

DEEP_EP_DEVICE void combine_body(const InternodeCombineParams& params, std::byte* memory) {
  const TransferParams& transfer = params.transfer;
  const InternodeParams& common = transfer.common;
  const NodeGrid& grid = common.grid;
  const InternodeCombineShared shared(Carver(memory), transfer, grid_blocks());
  const Call call = Call::begin(common.state->transfer, transfer.wait, shared.scratch);
  const std::uint64_t number = call.epoch - 1;
  const int local_warp = warp_index() - transfer.moving_warps();
  const CombinePusher pusher{params, number, shared.local_rows, shared.local_next + local_warp * grid.num_ranks};
  bool good = call.begun;
  if (good) {
    // 1. Publish where our rows are. That this kernel runs also says that they are written.
    if (block_index() == 0) {
      for (int index = thread_index(); index < grid.width; index += block_threads()) {
        publish_rows(params, call.epoch, index);
      }
    }
    // 2. Learn the same of the others of this node.
    for (int index = thread_index(); index < grid.width; index += block_threads()) {
      good = learn_rows(params, call.epoch, index, shared.ranks[index]) && good;
    }
    for (int ring = thread_index(); transfer.local_warps != 0 && ring < grid.num_ranks; ring += block_threads()) {
      shared.local_rows[ring] = pusher.rows_of(ring);
    }
    good = whole_block(good, shared.scratch);
  }

  // 3. Add for ourselves, add for our rails, push, post.
  if (good) {
    const LocalRows local(params, shared.ranks, number);
    const CombineRelay relay{local, shared.next + warp_index() * grid.others()};
    good = do_roles(
        transfer, number, shared, [&] { return CombineAdder{local}.add_all(); },
        [&](int part, int parts) { return relay.stage_all(part, parts); },
        [&](int part, int parts) { return pusher.push_all(part, parts); });
    good = whole_block(good, shared.scratch);
  }

  // 4. The last block signals to the node that its rows have been read, and waits for the same signal.
  call.end([&] {
    if (good) end_together(transfer, call.epoch);
  });
}

}  // namespace deep_ep::device::internode

DEEP_EP_DEFINE_KERNEL(combine_and_notify_internode, deep_ep::device::internode::combine_body)
