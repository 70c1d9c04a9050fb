// The pushing warps of combine, on a rank whose rows the others do not read where they lie: each moves rows through
// stages in shared memory into the local rings of the ranks of its node, in the order in which these add them up. One
// more warp raises the rows' words once they are complete there: the fence that this takes waits for answers from all
// peers, and would delay the warps that move rows.
//
// They take any ring that has room and never wait for one ring: its reader may wait for rows of another. When they
// have pushed all, they add (combine.cu): adding takes longer with few SMs.
#pragma once

#include "kernels/common/row_pipe.hpp"
#include "kernels/normal/transfer.hpp"
#include "kernels/primitives/bulk.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep {

/// A piece on its way to a slot of a ring.
struct PushedPiece {
  std::byte* to;        ///< nullptr: the pushing warp has no more
  std::uint64_t* word;  ///< of the row, on its last piece
  std::uint64_t value;
  std::uint32_t bytes;
};

/// Between a pushing warp and the one that raises its words: a queue of pieces. `complete` of a place ends a phase when
/// the piece has arrived at its owner, `free` when its word is raised.
struct PushedPieces {
  static constexpr std::uint32_t kPieces = 32;
  PushedPiece piece[kPieces];
  device::Mbarrier complete[kPieces];
  device::Mbarrier free[kPieces];
};

struct CombineShared : TransferShared<NodeRows> {
  PushedPieces* pieces;  ///< of each pushing warp
  WarpStages pipes;      ///< the same
  std::size_t bytes;

  DEEP_EP_HOST_DEVICE CombineShared(Carver carver, const TransferParams& params, int blocks)
      : TransferShared(carver, params, blocks, params.common.num_ranks),
        pieces(carver.take<PushedPieces>(static_cast<std::size_t>(params.pushing_warps()))),
        pipes(carver, params.pushing_warps(), params.pipe),
        bytes(pipes.bytes) {}
};

namespace device::normal {

/// The ring by which this rank pushes rows of tokens of `node` to rank `index` of its node, or gets them from it. There
/// is one for each node, so that rows are read in their order, and no node waits for another.
template <bool kRails>
DEEP_EP_DEVICE TokenRing combine_ring(const Transfer& call, int index, int node) {
  decltype(auto) grid = grid_of<kRails>(call.transfer.common);
  return {call.transfer, call.epoch, grid.first_of_node() + index, index * grid.nodes() + node,
          grid.index() * grid.nodes() + node};
}

/// By one warp: raises the words of rows that the block's pushing warps (at most 32, one lane each) have brought to
/// their owners.
DEEP_EP_DEVICE void raise_words(PushedPieces* pieces_of_warps, int pushing_warps) {
  constexpr std::uint32_t kPieces = PushedPieces::kPieces;
  bool finished = lane_index() >= pushing_warps;
  PushedPieces& pieces = pieces_of_warps[finished ? 0 : lane_index()];
  std::uint32_t raised = 0;
  for (int spins = 1; !warp::all(finished); ++spins) {
    std::uint32_t complete = raised;
    while (!finished && complete - raised < kPieces &&
           mbarrier::test(pieces.complete[complete % kPieces], complete / kPieces & 1)) {
      ++complete;
    }
    if (!warp::any(complete != raised)) {
      pause(spins);
      continue;
    }
    fence<Scope::system>();  // one for all rows that came in meanwhile
    for (; raised != complete; ++raised) {
      const PushedPiece& piece = pieces.piece[raised % kPieces];
      finished = piece.to == nullptr;
      if (piece.word != nullptr) store_relaxed<Scope::system>(piece.word, piece.value);
      mbarrier::arrive(pieces.free[raised % kPieces]);
    }
    spins = 0;
  }
}

/// By a whole warp. It numbers rings by their readers, from the next rank of the node on, so that not all ranks begin
/// with the same, then by the node of the reader's rail whose tokens the rows are of. A rank reads its own rows where
/// they lie.
template <bool kRails>
struct CombinePusher : Transfer {
  static constexpr std::uint32_t kUnderWay = 6;  ///< stores that need not be complete when the next is issued
  static constexpr std::uint32_t kPieces = PushedPieces::kPieces;

  const CombineParams& params;
  int warp;                  ///< of the local ones
  const std::int32_t* rows;  ///< [rings]: how many go by each
  std::int32_t* next;        ///< [rings], of the warp
  RowPipe pipe;
  PushedPieces& pieces;
  std::uint32_t told = 0;  ///< pieces that are known to be complete
  bool acquires = false;   ///< some ring has more rows than slots

  DEEP_EP_DEVICE decltype(auto) grid() const { return grid_of<kRails>(transfer.common); }
  DEEP_EP_DEVICE int rings() const { return (grid().width - 1) * grid().nodes(); }
  DEEP_EP_DEVICE int node_of(int number) const { return kRails ? number % grid().nodes() : 0; }
  DEEP_EP_DEVICE int reader_of(int number) const {
    const int reader = grid().index() + 1 + (kRails ? number / grid().nodes() : number);
    return reader < grid().width ? reader : reader - grid().width;
  }
  DEEP_EP_DEVICE int source_of(int number) const { return node_of(number) * grid().width + reader_of(number); }
  DEEP_EP_DEVICE TokenRing ring(int number) const {
    return combine_ring<kRails>(*this, reader_of(number), node_of(number));
  }

  /// Rows that go by a ring. Those of one source follow each other, by token.
  DEEP_EP_DEVICE std::int32_t rows_of(int number) const {
    const std::int32_t begin = transfer.first_row_of(source_of(number), grid().index());
    const std::int32_t end = transfer.end_of(source_of(number), grid().index());
    const std::int32_t held = end < params.num_rows ? end : params.num_rows;
    return begin < held ? held - begin : 0;
  }

  // The warp's pipeline: lane 0 loads and stores. Loads run ahead of stores; these complete later, and then the warp
  // that raises words is told.

  /// By one thread, before the warp's first piece.
  DEEP_EP_DEVICE void init() const {
    for (std::uint32_t at = 0; at < kPieces; ++at) {
      mbarrier::init(pieces.complete[at], 1);
      mbarrier::init(pieces.free[at], 1);
    }
    pipe.init();
  }
  /// Puts a piece into the next place of the queue, once the warp that raises words is done with that.
  DEEP_EP_DEVICE void enqueue(const PushedPiece& piece) const {
    if (lane_index() != 0) return;
    const std::uint32_t at = pipe.loaded % kPieces;
    if (pipe.loaded >= kPieces) mbarrier::wait(pieces.free[at], (pipe.loaded / kPieces - 1) & 1);
    pieces.piece[at] = piece;
  }
  DEEP_EP_DEVICE void store_oldest() {
    const PushedPiece& piece = pieces.piece[pipe.stored % kPieces];
    pipe.store(piece.bytes, [&](auto store) {
      if (lane_index() == 0) store(piece.to);
    });
    complete<kUnderWay>();
  }
  /// Waits until at most `kLeft` stores are under way, and tells about the others.
  template <std::uint32_t kLeft>
  DEEP_EP_DEVICE void complete() {
    if (pipe.stored - told <= kLeft) return;
    if (lane_index() == 0) {
      bulk::wait(static_cast<int>(kLeft));
      bulk::fence_global();
      for (std::uint32_t at = told; pipe.stored - at > kLeft; ++at) mbarrier::arrive(pieces.complete[at % kPieces]);
    }
    told = pipe.stored - kLeft;
  }
  DEEP_EP_DEVICE void flush() {
    while (pipe.stored < pipe.loaded) store_oldest();
    complete<0>();
  }

  DEEP_EP_DEVICE bool push(int number, std::int32_t n) {
    const TokenRing to = ring(number);
    const std::int64_t row = std::int64_t{transfer.first_row_of(source_of(number), grid().index())} + n;
    std::byte* slot = to.slot_there(n);
    // The lanes write the row's weights behind it; they count as written with its last piece.
    if (lane_index() < params.num_topk && params.topk_weights != nullptr) {
      reinterpret_cast<float*>(slot + params.row_bytes)[lane_index()] =
          load_weak(params.topk_weights + row * params.num_topk + lane_index());
    }
    warp::sync();
    if (acquires) bulk::fence_global();  // what the reader has read may be overwritten by bulk stores
    for (std::uint32_t offset = 0; offset < params.row_bytes; offset += pipe.stage_bytes) {
      const std::uint32_t rest = params.row_bytes - offset;
      const bool last = rest <= pipe.stage_bytes;
      const std::uint32_t bytes = last ? rest : pipe.stage_bytes;
      if (pipe.loaded - pipe.stored >= pipe.stages - 1) store_oldest();
      enqueue({slot + offset, last ? to.published_there(n) : nullptr, to.through(n), bytes});
      pipe.load(params.x + row * params.row_bytes + offset, bytes);
    }
    return true;
  }

  /// Pushes this warp's rows, which are every `step`th one of each ring. False after a fault.
  DEEP_EP_DEVICE bool push_all(int first, int step) {
    bulk::fence_global();  // the owners' words also say that their rings are free for our bulk stores
    for (int number = lane_index(); number < rings(); number += kWarpSize) {
      acquires = acquires || rows[number] > transfer.local.slots;
    }
    acquires = warp::any(acquires);
    const bool good = serve(
        rings(), policy(), next, first, step, [&](int number) { return rows[number]; },
        [&](int number, std::int32_t n) { return ring(number).room(n).missing(); },
        [&](int number, std::int32_t n) { return push(number, n); },
        [&] {
          if (told == pipe.loaded) return;
          if (acquires) bulk::fence_global();
          flush();  // rows under way may be what the owners wait for
        });
    enqueue(PushedPiece{nullptr, nullptr, 0, 0});
    if (lane_index() == 0) mbarrier::arrive(pieces.complete[pipe.loaded % kPieces]);
    warp::sync();
    return good;
  }
};

}  // namespace device::normal
}  // namespace deep_ep
