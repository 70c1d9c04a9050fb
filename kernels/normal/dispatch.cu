// Dispatch: every token's row goes once to each rank of this node that wants it, straight into the tensor that the
// receiver returns. Between nodes a token crosses the network once for each node that wants it, to the rank with the
// sender's index there, which spreads it by NVLink. A row's way:
//
//   1. A sending warp takes the token and loads its row.
//   2. It stores the row into its final place on each rank of this node that wants it, and, packed with all that
//      travels beside it and its numbers there (HeldRow), into the staging ring of each other node that does.
//   3. When a chunk of the staging ring is whole, a poster writes it into the landing ring of the rail (transfer.hpp).
//   4. There a forwarding warp loads it and stores it into its final places: its number at each rank, behind the rows
//      of the sources before.
//
// In one node steps 3 and 4 do not exist: kRails is false. The output of a rank may lie where the others do not reach
// it. In one node it then lands in the rank's window, if that holds all rows, and another kernel copies it behind this
// one (rows/spread_rows.cu). Otherwise rows come by local rings, and the receiver's fetching warps copy them to their
// final places.
#include <utility>

#include "kernels/common/row_pipe.hpp"
#include "kernels/common/rows.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/normal/transfer.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::normal {

// The two kinds of rows that a warp spreads.

/// A token of this rank.
template <bool kRails>
struct TokenRow {
  static constexpr bool kOurs = true;

  const DispatchParams* params;
  int token;

  DEEP_EP_DEVICE const std::byte* x() const { return params->x + std::int64_t{token} * params->rows.row_bytes; }
  DEEP_EP_DEVICE std::uint32_t scale(int at) const { return load_stream(params->scales.at(token, at)); }
  DEEP_EP_DEVICE std::int64_t selection_at(int at) const { return std::int64_t{token} * params->rows.num_topk + at; }
  DEEP_EP_DEVICE TopkIndices::Words selection(int at) const { return params->topk_idx.load_words(selection_at(at)); }
  DEEP_EP_DEVICE int expert(const TopkIndices::Words& selected) const {
    return expert_of(params->topk_idx.index_of(selected),
                     params->num_local_experts * params->transfer.common.num_ranks);
  }
  DEEP_EP_DEVICE float weight(int at) const {
    return params->topk_weights == nullptr ? 0.0f : load_stream(params->topk_weights + selection_at(at));
  }
  DEEP_EP_DEVICE std::int32_t src_idx() const { return token; }
  DEEP_EP_DEVICE int node() const { return kRails ? params->transfer.common.grid.node() : 0; }
  /// Its number among our rows at rank `index` of node `node`; -1: not wanted.
  DEEP_EP_DEVICE std::int32_t number_at(int node, int index) const {
    const int rank = kRails ? node * params->transfer.common.grid.width + index : index;
    return load_stream(params->transfer.destination_row + std::int64_t{token} * params->transfer.common.num_ranks +
                       rank);
  }
  /// Its number among the rows for node `node`; -1: not wanted.
  DEEP_EP_DEVICE std::int32_t number_for(int node) const {
    return load_stream(params->transfer.node_row + std::int64_t{token} * params->transfer.common.grid.nodes() + node);
  }
};

/// A row for the ranks of this node, in a slot that the warp has acquired.
struct SlotRow {
  static constexpr bool kOurs = false;

  PackedRow slot;
  int from_node;  ///< by the network

  DEEP_EP_DEVICE const std::byte* x() const { return slot.at; }
  DEEP_EP_DEVICE std::uint32_t scale(int at) const { return load_weak(slot.scales() + at); }
  DEEP_EP_DEVICE std::int32_t selection(int at) const { return load_weak(slot.experts() + at); }
  DEEP_EP_DEVICE static int expert(std::int32_t selected) { return selected; }
  DEEP_EP_DEVICE float weight(int at) const { return load_weak(slot.weights() + at); }
  DEEP_EP_DEVICE std::int32_t src_idx() const { return load_weak(slot.src_idx()); }
  DEEP_EP_DEVICE int node() const { return from_node; }
  DEEP_EP_DEVICE std::int32_t number_at(int, int index) const { return load_weak(slot.places() + index); }
};

/// A row as the lanes of a warp hold it between reading and writing. Nothing that load() loads is looked at before it
/// is used: so the loads of one row may be under way while the warp stores another. All by a whole warp.
template <class Row>
struct HeldRow {
  static constexpr int kScales = 4;  ///< that a lane holds; more are read again for each destination

  Row row;
  std::int32_t place = -1;  ///< at the destination of the lane's index, or still its number there: see place_of
  std::uint32_t scales[kScales] = {};
  decltype(std::declval<const Row&>().selection(0)) selection{};
  float weight = 0;
  std::int32_t src_idx = 0;

  DEEP_EP_DEVICE static HeldRow load(const DispatchParams& params, const Row& row, std::int32_t place) {
    HeldRow held{row, place};
    for (int i = 0; i < kScales; ++i) {
      const int at = lane_index() + i * kWarpSize;
      if (at < params.rows.num_scales) held.scales[i] = row.scale(at);
    }
    if (lane_index() < params.rows.num_topk) {
      held.selection = row.selection(lane_index());
      held.weight = row.weight(lane_index());
    }
    held.src_idx = row.src_idx();
    return held;
  }

  DEEP_EP_DEVICE void store_scales(const DispatchParams& params, std::uint32_t* to) const {
    for (int i = 0; i < kScales; ++i) {
      const int at = lane_index() + i * kWarpSize;
      if (at < params.rows.num_scales) to[at] = scales[i];
    }
    for (int at = lane_index() + kScales * kWarpSize; at < params.rows.num_scales; at += kWarpSize)
      to[at] = row.scale(at);
  }
  /// To the row's final place, at rank `rank`.
  DEEP_EP_DEVICE void store(const DispatchParams& params, const RowTargets::Row& to, int rank) const {
    store_scales(params, to.scales());
    if (lane_index() < params.rows.num_topk) {
      const int expert = row.expert(selection);
      const int local = expert - rank * params.num_local_experts;
      const bool here = expert >= 0 && local >= 0 && local < params.num_local_experts;
      store_topk_index(to.topk_idx(), params.rows.topk_idx_is_64_bit, lane_index(), here ? local : -1);
      to.topk_weights()[lane_index()] = here ? weight : 0.0f;
    }
    if (params.send_src_idx && lane_index() == 0) *to.src_idx() = src_idx;
  }
  /// To a slot for the ranks of a node, with `place(index)` for each.
  template <class PlaceOf>
  DEEP_EP_DEVICE void pack(const DispatchParams& params, const PackedRow& to, PlaceOf place_of) const {
    store_scales(params, to.scales());
    if (lane_index() < params.rows.num_topk) {
      to.experts()[lane_index()] = row.expert(selection);
      to.weights()[lane_index()] = weight;
    }
    if (lane_index() == 0) *to.src_idx() = src_idx;
    for (int index = lane_index(); index < params.transfer.common.grid.width; index += kWarpSize) {
      to.places()[index] = place_of(index);
    }
  }
};

template <bool kRails>
struct Dispatch : Transfer {
  static constexpr IntranodeSignal kSignal = IntranodeSignal::dispatch_rows;
  static constexpr Wanted kEnd = Wanted::dispatch_rows;
  using OwnRow = HeldRow<TokenRow<kRails>>;

  const DispatchParams& params;
  const DispatchShared& shared;
  RowPipe pipe;           ///< of a sending or forwarding warp
  std::int64_t received;  ///< rows of this rank
  OwnRow first_row{};     ///< of a sending warp

  DEEP_EP_DEVICE decltype(auto) grid() const { return grid_of<kRails>(transfer.common); }

  // 1. A sending or forwarding warp spreads rows, by way of shared memory, to destinations: the ranks of this node, by
  // index, and, for a row of this rank, the other nodes, by number. A row's place at a destination is its final place
  // at a rank, or its number among the rows for a node; -1: it is not wanted there.

  DEEP_EP_DEVICE bool is_node(int destination) const { return kRails && destination >= grid().width; }
  template <class Row>
  DEEP_EP_DEVICE int destinations(const Row&) const {
    return grid().width + (Row::kOurs ? grid().others() : 0);
  }

  template <class Row>
  DEEP_EP_DEVICE std::int32_t number_at(const Row& row, int destination) const {
    if (destination >= destinations(row)) return -1;
    if constexpr (kRails && Row::kOurs) {
      if (is_node(destination)) return row.number_for(grid().other(destination - grid().width));
    }
    return row.number_at(grid().node(), destination);
  }
  template <class Row>
  DEEP_EP_DEVICE std::int32_t place_of(const Row& row, int destination, std::int32_t number) const {
    if (number < 0 || is_node(destination)) return number;
    return number + shared.first_rows[row.node() * grid().width + destination];
  }
  template <class Row>
  DEEP_EP_DEVICE std::int32_t place_at(const Row& row, int destination) const {
    return place_of(row, destination, number_at(row, destination));
  }
  /// Does the warp store a row with this place there? Not one that the rank has no room for, or gets by a local ring.
  DEEP_EP_DEVICE bool is_stored(int destination, std::int32_t place) const {
    return place >= 0 && (is_node(destination) || place < shared.ranks[destination].reachable);
  }
  DEEP_EP_DEVICE bool goes_by_ring(int index, std::int32_t place) const {
    return index < grid().width && place >= shared.ranks[index].reachable && place < shared.ranks[index].capacity;
  }
  template <class Row>
  DEEP_EP_DEVICE HeldRow<Row> hold(const Row& row) const {
    return HeldRow<Row>::load(params, row, number_at(row, lane_index()));
  }

  DEEP_EP_DEVICE std::byte* staging_slot(int destination, std::int32_t place) const {
    return rings().staging(destination - grid().width, place).in(own_heap());
  }

  /// Calls `use(destination, place)` for each of this lane's destinations to which the warp stores the row.
  template <class Row, class Use>
  DEEP_EP_DEVICE void for_each(const HeldRow<Row>& held, Use use) const {
    std::int32_t place = held.place;
    for (int destination = lane_index();;) {
      if (is_stored(destination, place)) use(destination, place);
      destination += kWarpSize;
      if (destination >= destinations(held.row)) break;
      place = place_at(held.row, destination);
    }
  }

  /// By the whole warp: stores what travels beside the row, and where it goes by a local ring all of it. False after a
  /// fault.
  ///
  /// A warp takes a number in a ring only when it has stored what it took before, so the oldest number not stored waits
  /// for nothing but the receiver, which takes rows as they come.
  template <class Row>
  DEEP_EP_DEVICE bool store_sidecars(const HeldRow<Row>& held) const {
    for (int first = 0; first < destinations(held.row); first += kWarpSize) {
      const int own = first + lane_index();
      const std::int32_t mine = first == 0 ? held.place : place_at(held.row, own);
      const bool wanted = is_stored(own, mine) || (by_rings && goes_by_ring(own, mine));
      for (std::uint32_t left = warp::ballot(wanted); left != 0; left &= left - 1) {
        const int destination = first + lowest_bit(left);
        const std::int32_t place = warp::shuffle(mine, lowest_bit(left));
        if constexpr (kRails && Row::kOurs) {
          if (is_node(destination)) {
            const int node = grid().other(destination - grid().width);
            held.pack(params, {staging_slot(destination, place), params.rows},
                      [&](int index) { return held.row.number_at(node, index); });
            continue;
          }
        }
        if (by_rings && goes_by_ring(destination, place)) {
          const TokenRing to = ring<kRails>(destination, held.row.node());
          const auto n = static_cast<std::int32_t>(take_next(transfer.common.state->local_tickets + to.here));
          if (!to.room(n).template await<WholeWarp>(policy())) return false;
          bulk::fence_global();  // bulk stores come behind what the warp has acquired
          copy_row(to.slot_there(n), held.row.x(), params.rows.row_bytes);
          held.pack(params, {to.slot_there(n), params.rows}, [&](int at) { return place_at(held.row, at); });
          to.publish(n);
          continue;
        }
        // A copy: the original is in shared memory, and for all the compiler knows each store here changes it.
        const RowTargets rows = shared.ranks[destination].rows;
        held.store(params, rows.row(params.rows, place), grid().first_of_node() + destination);
      }
    }
    return true;
  }

  /// Finds the row's places, waits by `may_store()` for its slots, and begins to store it. It is loading; the row at
  /// `next()` begins to load behind its last piece, unless that is nullptr. False after a fault.
  template <class Row, class Next, class MayStore>
  DEEP_EP_DEVICE bool spread(HeldRow<Row>& held, Next next, MayStore may_store) {
    held.place = place_of(held.row, lane_index(), held.place);
    bool good = may_store();
    if (good) {
      const auto to_each = [&](auto store) {
        for_each(held, [&](int destination, std::int32_t place) {
          store(is_node(destination) ? staging_slot(destination, place)
                                     : shared.ranks[destination].rows.row(params.rows, place).x());
        });
      };
      pipe.move([&] { return held.row.x(); }, next, params.rows.row_bytes, to_each);
      good = store_sidecars(held);
    }
    return good;
  }

  // 2. The sending warps. While one stores a row, the next is loading with all that travels beside it, and the token
  // behind that is being drawn.
  //
  // A warp takes its tokens in order, and a ring's chunks are freed in order. So some warp is at the oldest token that
  // is not stored, and finds room, whatever the others wait for.

  DEEP_EP_DEVICE OwnRow token_row(int token) const {
    const TokenRow<kRails> row{&params, token};
    return token < transfer.num_tokens ? hold(row) : OwnRow{row};
  }
  DEEP_EP_DEVICE bool is_row(const OwnRow& held) const { return held.row.token < transfer.num_tokens; }

  /// Waits until the row's slots in the staging rings may be written. False after a fault.
  DEEP_EP_DEVICE bool await_room(const OwnRow& held) const {
    if constexpr (!kRails) return true;
    bool good = true;
    for_each(held, [&](int destination, std::int32_t place) {
      const int chunk = rings().chunk_of(place);
      if (!is_node(destination) || chunk < rings().chunks) return;
      good = stageable(destination - grid().width, chunk).await(policy()) && good;
      bulk::fence_global();  // what the NIC has read may be overwritten by bulk stores
    });
    return warp::agree(good);
  }

  /// The row is stored, as soon as this warp's bulk stores are complete: counts it in the chunks that it belongs to.
  DEEP_EP_DEVICE void end_storing(OwnRow& held) const {
    if (!kRails || !is_row(held)) return;
    bulk::wait(0);
    bulk::fence_global();
    warp::sync();  // what the other lanes have stored comes before, too
    for_each(held, [&](int destination, std::int32_t place) {
      if (is_node(destination)) count_staged(destination - grid().width, place);
    });
    held = token_row(transfer.num_tokens);
  }

  /// Sends tokens until none is left. False after a fault.
  DEEP_EP_DEVICE bool first(bool helps) {
    if (helps) return true;
    OwnRow row = first_row;
    Turns turns = Turns::of_warp(&transfer.common.state->pieces_drawn, static_cast<std::uint32_t>(transfer.num_tokens),
                                 grid_blocks() * transfer.first_warps, number_in_grid(warp_index()));
    OwnRow stored = token_row(transfer.num_tokens);  // whose last piece may not be complete yet
    while (is_row(row)) {
      const std::uint32_t drawn = turns.draw();
      const OwnRow next = token_row(static_cast<int>(turns.following));
      const auto may_store = [&] {
        end_storing(stored);  // before waiting for room: others may wait for this row
        return await_room(row);
      };
      const auto following = [&] { return is_row(next) ? next.row.x() : nullptr; };
      if (!spread(row, following, may_store)) return false;
      stored = row;
      row = next;
      turns.advance(drawn);
    }
    end_storing(stored);
    bulk::wait(0);
    bulk::fence_global();
    return true;
  }

  // 3. The forwarding warps.

  DEEP_EP_DEVICE PackedRow slot(int number, int row) const {
    return {rings().landing(number, row).in(own_heap()), params.rows};
  }

  DEEP_EP_DEVICE bool forward(int number, int at) {
    bulk::fence_global();  // the row has landed: bulk loads may read it
    pipe.begin(slot(number, at).at, params.rows.row_bytes);
    // While the row is loading. The shape arrived before any row; each warp compares it for itself. A warp drops rows
    // of another shape, as they would name places of other rows; the poster puts the fault on record. The chunk came by
    // one of the lanes, behind its shape.
    const int lane = lane_index() < transfer.common.lanes ? lane_index() : 0;
    const std::uint64_t theirs = load_relaxed<Scope::system>(shape_from(number, lane));
    if (!warp::agree(shapes_agree(rail_shape(number), theirs))) {
      pipe.drop();
    } else {
      HeldRow held = hold(SlotRow{slot(number, at), grid().other(number)});
      // For combine: where this one of the rows that came from other nodes has gone: its numbers there.
      const std::int64_t noted = params.send_src_idx ? relayed(transfer.counts.from_node, number, at) : INT64_MAX;
      for (int index = lane_index(); noted < transfer.relay_rows_room && index < grid().width; index += kWarpSize) {
        transfer.relay_rows[noted * grid().width + index] = number_at(held.row, index);
      }
      const auto no_row = []() -> const std::byte* { return nullptr; };
      if (!spread(held, no_row, [] { return true; })) return false;
    }
    // All of it is in shared memory or in registers: the slot may be written again.
    warp::sync();
    if (lane_index() == 0) count_read(number, at);
    return true;
  }

  /// Forwards this warp's rows, a share of each node's. False after a fault.
  DEEP_EP_DEVICE bool second(int warp) {
    const bool good = serve(
        grid().others(), warp, transfer.second_warps,
        [&](int number) { return transfer.counts.from_node[grid().other(number)]; },
        [&](int number, int at) { return landed(number, at).missing(); },
        [&](int number, int at) { return forward(number, at); });
    bulk::wait(0);
    bulk::fence_global();
    return good;
  }

  // 4. The fetching warps, on a rank whose output the others do not reach. They wait for no rank that might wait for
  // it.

  DEEP_EP_DEVICE std::int32_t rows_by_ring(int source) const { return rows_of(source, params.output_rows); }
  DEEP_EP_DEVICE static AwaitedWord word_of(const TokenRing& from, std::int32_t n) { return from.row(n); }
  DEEP_EP_DEVICE bool local(const TokenRing& from, std::int32_t n) const {
    const SlotRow row{{from.slot(n), params.rows}, 0};
    const RowTargets::Row to = params.output.row(params.rows, load_weak(row.slot.places() + grid().index()));
    HeldRow<SlotRow>::load(params, row, -1).store(params, to, grid().rank);
    copy_row(to.x(), row.x(), params.rows.row_bytes);
    warp::sync();  // all lanes have read it
    // The writer waits for room for a row that many places behind alone.
    if (lane_index() == 0 && n + transfer.local.slots < shared.local_rows[from.here]) from.release(n);
    return true;
  }

  // 5. The steps of all threads.

  DEEP_EP_DEVICE DispatchAddresses ours(int) const {
    constexpr std::int64_t kMost = INT32_MAX;  // as many as places have numbers
    return {.rows = params.output.seen_from(nullptr, own_heap()),
            .capacity = static_cast<std::int32_t>(params.output_rows < kMost ? params.output_rows : kMost),
            .by_ring = transfer.local_warps != 0 ? 1 : 0,
            .agreed = {static_cast<std::int32_t>(params.rows.row_bytes), params.rows.num_scales, params.rows.num_topk}};
  }
  /// A sending warp's first row comes to shared memory, with what travels beside it.
  DEEP_EP_DEVICE void prepare() {
    if (warp_index() < transfer.moving_warps() && lane_index() == 0) pipe.init();
    // Rows that nothing fills have no experts. There are some with worst-case sizes.
    const int topk = params.rows.num_topk;
    for (std::int64_t i = received * topk + block_index() * block_threads() + thread_index();
         i < params.output_rows * topk; i += grid_blocks() * block_threads()) {
      store_topk_index(params.output.topk_idx, params.rows.topk_idx_is_64_bit, i, -1);
    }
    first_row = token_row(warp_index() < transfer.first_warps ? number_in_grid(warp_index()) : transfer.num_tokens);
    if (is_row(first_row)) pipe.begin(first_row.row.x(), params.rows.row_bytes);
  }
  DEEP_EP_DEVICE bool learn(const Meeting& meeting, int index) {
    const int peer = grid().first_of_node() + index;
    DispatchAddresses theirs;
    if (!meeting.hear(peer, theirs) || !meeting.agrees(ours(index).agreed, theirs.agreed, peer)) return false;
    bulk::fence_global();  // the addresses also say that the memory is free for our bulk stores
    shared.ranks[index] = {.rows = theirs.rows.seen_from(transfer.common.heaps[peer], nullptr),
                           .capacity = theirs.capacity,
                           .reachable = theirs.by_ring != 0 ? 0 : theirs.capacity};
    by_rings = by_rings || theirs.by_ring != 0;
    return true;
  }
  DEEP_EP_DEVICE void finish() const {
    if (thread_index() != 0) return;
    Wanted wanted = Wanted::dispatch_rows;
    std::int64_t rows = received, room = params.output_rows;
    if (kRails && params.send_src_idx && rows <= room) {
      // Combine would not know where the rows are of tokens that this rank forwarded beyond its room.
      wanted = Wanted::internode_rows, rows = 0, room = transfer.relay_rows_room;
      for (int number = 0; number < grid().others(); ++number) rows += transfer.counts.from_node[nodes().other(number)];
    }
    // A note (the first one counts): the call goes on, and a later one reports it.
    if (rows <= room) return;
    write_record(transfer.common.wait.fault[1], FaultKind::overflow, wanted, grid().rank, 0,
                 static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(room));
  }
};

template <bool kRails>
DEEP_EP_DEVICE void dispatch_body(const DispatchParams& params, std::byte* memory) {
  const TransferParams& transfer = params.transfer;
  const NormalParams& common = transfer.common;
  const DispatchShared shared{{Carver(memory), transfer}};
  // When notify found that the ranks disagree, no rank sends anything.
  const Call call = Call::begin(kRails ? common.state->transfer : common.state->dispatch, common.wait);
  decltype(auto) grid = grid_of<kRails>(common);
  const std::int64_t received = call.begun ? transfer.end_of(grid.num_ranks - 1, grid.index()) : 0;
  Dispatch<kRails> dispatch{
      {transfer, call.epoch, shared.next_of_warp()}, params, shared, shared.pipes.pipe(warp_index()), received};
  transfer_rows<kRails>(dispatch, call, {common, Wanted::dispatch_addresses, MeetingKind::dispatch, call.epoch});
  dispatch.pipe.drop();  // what is prepared and not sent
}

}  // namespace deep_ep::device::normal

DEEP_EP_DEFINE_KERNEL(dispatch, deep_ep::device::normal::dispatch_body<false>)
DEEP_EP_DEFINE_KERNEL(dispatch_and_notify_internode, deep_ep::device::normal::dispatch_body<true>)
