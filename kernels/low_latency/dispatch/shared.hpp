// Shared memory of a block of the low-latency dispatch; and how the header of a row is read out of its lines.
#pragma once

#include "kernels/low_latency/params.hpp"
#include "kernels/low_latency/transport/masks.hpp"
#include "kernels/rdma/poster.hpp"

namespace deep_ep::device::low_latency {

struct DispatchShared {
  struct Words {
    LowLatencyEpochs epochs;
    MaskWords masks;
    std::int32_t destinations;    ///< of the current token
    std::int32_t staged;          ///< one of them is the staging memory, for far ranks
    std::int32_t failed;          ///< a wait was called off: the call is over
    std::int32_t unknown_expert;  ///< in blocks that send counts, not 0: this rank refuses the call
  };

  Words* words;
  std::byte** destinations;     ///< [kMaxTopk]: where the current token's row goes, in the window of each rank
  std::byte** heaps;            ///< [ranks]
  std::uint64_t* acknowledged;  ///< [ranks], sending: what each rank had acknowledged when the block began
  std::int32_t* left_out;       ///< [ranks]: not 0: nothing is sent to this rank, nothing expected from it
  /// [ranks]. Sending: tokens counted so far that go to each rank. Receiving: rows of each source.
  std::uint32_t* rows;
  /// [experts], behind `rows`. Sending: entries counted so far that name each expert. Receiving, [rank][local expert]:
  /// rows that each source has for each of our experts, then where they begin.
  std::uint32_t* entries;
  /// [ranks], by rails. Receiving: rows of each source that this rank hands on. In blocks that post: tokens counted so
  /// far that go to each node.
  std::uint32_t* relayed;
  std::byte* stage;            ///< the row to send, without tags
  rdma::PosterWords* posters;  ///< in blocks that post, instead of the stage: of each warp
  std::size_t bytes;

  /// `stage_bytes`: 0 where nothing is sent. `poster_warps`: 0 where nothing is posted.
  DEEP_EP_HOST_DEVICE DispatchShared(Carver carver, int num_ranks, int num_experts, std::size_t stage_bytes,
                                     int poster_warps) {
    const auto ranks = static_cast<std::size_t>(num_ranks);
    words = carver.take<Words>();
    destinations = carver.take<std::byte*>(kMaxTopk);
    heaps = carver.take<std::byte*>(ranks);
    acknowledged = carver.take<std::uint64_t>(ranks);
    left_out = carver.take<std::int32_t>(ranks);
    rows = carver.take<std::uint32_t>(ranks);
    entries = carver.take<std::uint32_t>(static_cast<std::size_t>(num_experts));
    relayed = carver.take<std::uint32_t>(ranks);
    Carver instead = carver;
    stage = carver.take<std::byte>(stage_bytes, kLine);
    posters = instead.take<rdma::PosterWords>(static_cast<std::size_t>(poster_warps), kLine);
    bytes = carver.bytes() > instead.bytes() ? carver.bytes() : instead.bytes();
  }
};

// A warp has the header in the lines that it loads at once: the token, and expert and slot of each selection.
static_assert(sizeof(std::uint32_t) * (1 + 2 * kMaxTopk) <= kWarpLines * kTaggedPayload);

/// Word `word` of the header, of whose lines each lane has a part; another one in every lane. By a whole warp.
DEEP_EP_DEVICE std::uint32_t header_word(const LinePart& head, int word) {
  const std::uint32_t at = 4 * static_cast<std::uint32_t>(word);
  const std::uint32_t in_line = at % kTaggedPayload;
  const int holder = static_cast<int>(at / kTaggedPayload * kLineLanes + in_line / 16);
  const std::uint64_t low = warp::shuffle(head.word[0], holder);
  const std::uint64_t high = warp::shuffle(head.word[1], holder);
  const std::uint64_t both = in_line % 16 < 8 ? low : high;
  return static_cast<std::uint32_t>(at % 8 == 0 ? both : both >> 32);
}

}  // namespace deep_ep::device::low_latency
