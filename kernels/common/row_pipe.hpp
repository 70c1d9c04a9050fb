// A warp's pipeline through shared memory: pieces of rows are loaded by bulk copies and stored from there, the next one
// loading while the one before is stored.
#pragma once

#include "kernels/common/carver.hpp"
#include "kernels/primitives/bulk.hpp"
#include "kernels/primitives/divisor.hpp"
#include "kernels/primitives/thread.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep {

/// How a warp's pipeline is cut. Plain data, set by the host.
struct PipeShape {
  Divisor stages;             ///< 2..8
  std::uint32_t stage_bytes;  ///< rows move in pieces of at most this size, multiple of 128
};

namespace device {

struct RowPipe : PipeShape {
  Mbarrier* barriers;  ///< [stages]
  std::byte* memory;
  std::uint32_t loaded = 0, stored = 0;  ///< pieces so far

  DEEP_EP_DEVICE int stage_of(std::uint32_t piece) const { return static_cast<int>(piece) % stages; }
  DEEP_EP_DEVICE std::byte* memory_of(std::uint32_t piece) const {
    return memory + static_cast<std::uint32_t>(stage_of(piece)) * stage_bytes;
  }
  DEEP_EP_DEVICE void await(std::uint32_t piece) const {
    mbarrier::wait(barriers[stage_of(piece)], static_cast<std::uint32_t>(static_cast<int>(piece) / stages & 1));
  }

  /// By one lane, before the warp's first load.
  DEEP_EP_DEVICE void init() const {
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) mbarrier::init(barriers[stage]);
    mbarrier::fence_init();
  }

  /// Begins to load a row: all of it, or its first piece. At most one more piece may be under way.
  DEEP_EP_DEVICE void begin(const std::byte* row, std::uint32_t row_bytes) {
    const std::uint32_t bytes = row_bytes < stage_bytes ? row_bytes : stage_bytes;
    // Every lane that stored from this stage must have seen its stores read it: all but the latest stages - 2, or - 1
    // where nothing is under way.
    bulk::wait_read(stages - 1 - static_cast<int>(loaded - stored));
    warp::sync();
    if (lane_index() == 0) {
      Mbarrier& barrier = barriers[stage_of(loaded)];
      mbarrier::arrive_expect_bytes(barrier, bytes);
      bulk::load(memory_of(loaded), row, bytes, barrier);
    }
    ++loaded;
  }

  /// Waits for the oldest piece that is loading, and begins to store it wherever `to_each(store)` calls
  /// `store(address)`; lanes do so for themselves.
  template <class ToEach>
  DEEP_EP_DEVICE void store(std::uint32_t bytes, ToEach to_each) {
    await(stored);
    const std::byte* from = memory_of(stored);
    to_each([&](std::byte* to) { bulk::store(to, from, bytes); });
    bulk::commit();
    ++stored;
  }

  /// Begins to store the row at `row()`, which begin() loads, like store(). While a piece is stored the next one loads,
  /// behind the last one the first of the row at `next()`. Either may be nullptr: there is none. A piece is stored
  /// before the warp waits for room for the next one, so that it always has something to store.
  template <class Row, class Next, class ToEach>
  DEEP_EP_DEVICE void move(Row row, Next next, std::uint32_t bytes, ToEach to_each) {
    bool last = false;
#pragma unroll 1
    for (std::uint32_t offset = 0; !last; offset += stage_bytes) {
      const std::uint32_t rest = row() != nullptr ? bytes - offset : 0;
      last = rest <= stage_bytes;
      if (rest != 0) {
        store(last ? rest : stage_bytes,
              [&](auto store_at) { to_each([&](std::byte* to) { store_at(to + offset); }); });
      }
      const std::byte* const from = last ? next() : row() + offset + stage_bytes;
      if (from != nullptr) begin(from, last ? bytes : rest - stage_bytes);
    }
  }

  /// Where pieces are given up: none may arrive when the memory is no longer the block's.
  DEEP_EP_DEVICE void drop() {
    for (; stored != loaded; ++stored) await(stored);
    bulk::wait(0);
  }
};

}  // namespace device

/// Shared memory of a block whose warps have a pipeline each, and nothing else.
struct WarpStages {
  Carver carver;
  int warps;
  PipeShape shape;  ///< of each
  std::size_t stages = warps * shape.stages;
  device::Mbarrier* barriers = carver.take<device::Mbarrier>(stages, kLine);
  std::byte* memory = carver.take<std::byte>(stages * shape.stage_bytes, kLine);
  std::size_t bytes = carver.bytes();

  DEEP_EP_DEVICE device::RowPipe pipe(int warp) const {
    const int first = warp * shape.stages;
    return {shape, barriers + first, memory + std::int64_t{first} * shape.stage_bytes};
  }
};

}  // namespace deep_ep
