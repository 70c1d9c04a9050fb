// Do tagged lines arrive whole between these ranks? Low-latency calls rely on it (primitives/line.hpp), and NVIDIA
// documents it for no interconnect. Within a host it is tested; over the fabric between hosts a buffer tries it when it
// is made.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/wait.hpp"
#include "kernels/primitives/line.hpp"

namespace deep_ep {

struct LineTestParams {
  int rank, num_ranks;
  int rounds;
  std::byte* const* heaps;   ///< nullptr for a rank that shares no memory with this one
  std::size_t begin;         ///< of the place for lines, an offset in every heap; its contents are lost
  std::uint64_t timeout_ns;  ///< 0: for ever
  std::uint32_t* torn;       ///< [num_ranks], zeros before: rounds in which a tag of that rank came before its payload
  std::uint32_t* late;       ///< [num_ranks], zeros before: 1 where nothing came in time

  static constexpr std::size_t kBytesOfWarp = device::kWarpLines * kTaggedLine;
  static constexpr std::size_t bytes(int num_ranks) { return 2 * static_cast<std::size_t>(num_ranks) * kBytesOfWarp; }
  /// Lines of `source`: rounds take turns with two places.
  DEEP_EP_HOST_DEVICE std::byte* lines(int of_rank, int source, int round) const {
    const auto place = static_cast<std::size_t>((round & 1) * num_ranks + source);
    return heaps[of_rank] + begin + place * kBytesOfWarp;
  }
};

namespace device {

/// Any two words of all lines and rounds differ.
DEEP_EP_DEVICE std::uint64_t line_test_word(int source, int round, std::uint32_t at) {
  return static_cast<std::uint64_t>(round) << 32 | static_cast<std::uint64_t>(source) << 16 | at;
}

/// A warp for each peer, all of them at once: both ranks send four lines in each round, and look at those of the other.
/// Lines of a round say that their sender has read those of the round before, in whose places the next ones go.
/// `store(to, part, round)` is store_line().
template <class Store>
DEEP_EP_DEVICE void test_lines(const LineTestParams& params, Store store) {
  const int peer = block_index() * block_warps() + warp_index();
  if (peer >= params.num_ranks || peer == params.rank || params.heaps[peer] == nullptr) return;
  const LineLane lane;
  const std::uint32_t at = lane.byte_at(static_cast<std::uint32_t>(lane.line));
  const auto part_of = [&](int source, int round) {
    const auto tag = static_cast<std::uint64_t>(round);
    return LinePart{{line_test_word(source, round, at), lane.has_tag() ? tag : line_test_word(source, round, at + 8)}};
  };
  std::uint32_t torn = 0;
  bool came = true;
#pragma unroll 1
  for (int round = 1; came && round <= params.rounds; ++round) {
    store(params.lines(peer, params.rank, round) + at, part_of(params.rank, round), round);
    const std::byte* from = params.lines(params.rank, peer, round) + at;
    const LinePart wanted = part_of(peer, round);
    bool seen = false;
    bool whole = true;
    const auto all_seen = [&](const Poll&) {
      const LinePart now = load_line(from, !seen);
      const std::uint64_t tag = warp::shuffle(now.word[1], lane.line * kLineLanes + kLineLanes - 1);
      if (!seen && tag == static_cast<std::uint64_t>(round)) {
        whole = now.word[0] == wanted.word[0] && now.word[1] == wanted.word[1];
        seen = true;
      }
      return warp::all(seen);
    };
    came = poll_until(all_seen, [&](const Poll& poll) {
      return warp::any(params.timeout_ns != 0 && now_ns() - poll.begin > params.timeout_ns);
    });
    if (!warp::all(whole)) ++torn;
  }
  if (lane_index() != 0) return;
  store_relaxed<Scope::gpu>(params.torn + peer, torn);
  store_relaxed<Scope::gpu>(params.late + peer, came ? 0u : 1u);
}

}  // namespace device
}  // namespace deep_ep
