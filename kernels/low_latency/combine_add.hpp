// The owner's side of combine: the rows of a token, one from each rank that has something to say, are added in fp32, by
// rank, and rounded.
//
// A block takes a token, and its adding warps share the token's vectors, so that each thread has a load from every row
// under way at once. One warp finds out whose rows there are and waits for them, a token ahead of the others.
#pragma once

#include "kernels/low_latency/combine_announce.hpp"
#include "kernels/low_latency/combine_shared.hpp"
#include "kernels/primitives/block.hpp"

namespace deep_ep::device::low_latency {

struct CombineAdder {
  static constexpr int kTogether = 8;  ///< rows whose loads are under way at once
  static constexpr int kBarrier = 1;

  const LowLatencyCombineParams& params;
  const CombineWire& wire;
  std::uint64_t epoch;
  int thread, threads;      ///< of the block's part that adds; the first warp only waits
  CombineSources* sources;  ///< [2]: one for the next token, while the others still look at this one's

  DEEP_EP_DEVICE void add_all() const {
    if (thread < kWarpSize) {
      each_token([&](int token, CombineSources& of_token) {
        find_sources(token, of_token);
        block::sync(kBarrier, threads);
        return of_token.count >= 0;
      });
    } else {
      each_token([&](int token, const CombineSources& of_token) {
        block::sync(kBarrier, threads);
        if (of_token.count < 0) return false;
        if (of_token.count == 0) {
          clear(token);
        } else if (wire.logfmt) {
          add_logfmt(token, of_token);
        } else {
          add(token, of_token);
        }
        return true;
      });
    }
  }

 private:
  template <class Work>
  DEEP_EP_DEVICE void each_token(Work work) const {
    int turn = 0;
    for (int token = block_index(); token < params.num_tokens; token += grid_blocks()) {
      if (!work(token, sources[turn])) return;
      turn ^= 1;
    }
  }

  DEEP_EP_DEVICE const std::byte* row(int rank, int token) const {
    return params.common.local +
           params.common.window.row_at(LowLatencyKind::combine, epoch, rank, token, params.row_bytes);
  }

  /// Which ranks have rows of the token, and are they there? Those that are masked are left out.
  DEEP_EP_DEVICE void find_sources(int token, CombineSources& of_token) const {
    const int lane = lane_index();
    const std::int32_t expert = lane < params.num_topk ? load_expert(params, token, lane) : -1;
    const int rank = expert < 0 ? -1 : expert / params.num_local_experts;

    // Of the selections on one rank, the first stands for it; it is in line behind those on lower ranks.
    const bool first = lowest_bit(warp::match_any(static_cast<std::uint32_t>(rank))) == lane && rank >= 0;
    const bool wanted = first && !masked(params.common, rank);
    bool there = wanted && wait(rank, token);
    warp::sync();  // what one lane acquired, others may read only after this
    int place = 0;
    for (std::uint32_t left = warp::ballot(there); left != 0; left &= left - 1) {
      place += warp::shuffle(rank, lowest_bit(left)) < rank ? 1 : 0;
    }
    if (there) of_token.row[place] = row(rank, token);
    const int count = count_bits(warp::ballot(there));
    if (lane == 0) of_token.count = aborted(params.common.wait) ? -1 : count;
  }

  DEEP_EP_DEVICE bool wait(int rank, int token) const {
    const LowLatencyParams& common = params.common;
    const auto* flag = reinterpret_cast<const std::uint64_t*>(
        common.local + common.window.flag_at(LowLatencyKind::combine, epoch, rank, token));
    const std::int64_t begin = clock_cycles();
    const bool came = await_word(common, flag, epoch, epoch, rank, Wanted::low_latency_combine_rows);
    if (params.wait_cost != nullptr) {
      add_relaxed<Scope::gpu>(params.wait_cost + rank, clock_cycles() - begin);
    }
    return came;
  }

  DEEP_EP_DEVICE int adding_thread() const { return thread - kWarpSize; }
  DEEP_EP_DEVICE int adding_threads() const { return threads - kWarpSize; }
  DEEP_EP_DEVICE Vec16* result(int token) const {
    return reinterpret_cast<Vec16*>(params.combined_x) + std::int64_t{token} * wire.vectors();
  }

  /// Vector by vector, and row by row within one, as in combine_sum.hpp.
  DEEP_EP_DEVICE void add(int token, const CombineSources& of_token) const {
    const int rows = of_token.count;
    const int pieces = (wire.vectors() + adding_threads() - 1) / adding_threads() * rows;
    int row_to_load = 0;
    int vector_to_load = adding_thread();
    int row_to_add = 0;
    int vector_to_add = adding_thread();
    float sum[8] = {};
    for (int piece = 0; piece < pieces; piece += kTogether) {
      Vec16 loaded[kTogether] = {};
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (piece + i >= pieces) continue;
        const auto* row = reinterpret_cast<const Vec16*>(of_token.row[row_to_load]);
        if (vector_to_load < wire.vectors()) loaded[i] = load_weak(row + vector_to_load);
        if (++row_to_load != rows) continue;
        row_to_load = 0;
        vector_to_load += adding_threads();
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (piece + i >= pieces) continue;
        add_bf16(sum, loaded[i]);
        if (++row_to_add != rows) continue;
        if (vector_to_add < wire.vectors()) store_stream(result(token) + vector_to_add, pack_sum(sum));
        for (float& part : sum) part = 0.0f;
        row_to_add = 0;
        vector_to_add += adding_threads();
      }
    }
  }

  /// A vector of up to kTogether rows at once: where it is depends on the rows' ranges.
  DEEP_EP_DEVICE void add_logfmt(int token, const CombineSources& of_token) const {
    for (int vector = adding_thread(); vector < wire.vectors(); vector += adding_threads()) {
      const VectorPlace place(wire, vector);
      float sum[8] = {};
      for (int begin = 0; begin < of_token.count; begin += kTogether) {
        const std::byte* const* rows = of_token.row + begin;
        const int count = of_token.count - begin;
        std::uint32_t range[kTogether];
        Vec16 loaded[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (i < count) range[i] = load_range(rows[i], place);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (i < count) loaded[i] = load_channels(rows[i], place, range[i]);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (i < count) add_channels(sum, loaded[i], place, range[i]);
        }
      }
      store_stream(result(token) + vector, pack_sum(sum));
    }
  }

  /// Of a token that nobody has anything to say of.
  DEEP_EP_DEVICE void clear(int token) const {
    for (int vector = adding_thread(); vector < wire.vectors(); vector += adding_threads()) {
      store_stream(result(token) + vector, Vec16{});
    }
  }
};

}  // namespace deep_ep::device::low_latency
