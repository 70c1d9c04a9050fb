// Messages and words by which ranks tell each other how far calls have come and how their rows lie.
#pragma once

#include <cstdint>

#include "kernels/common/limits.hpp"
#include "kernels/primitives/divisor.hpp"

namespace deep_ep {

/// How far calls have come, in a word that only grows: a call's number above its position, the steps of the call that
/// are done. A word of a later call says that all steps of the calls before are done, and words compare as numbers do.
struct Progress {
  static constexpr int kPositionBits = 24;  ///< so calls have 40: at 10,000 calls a second they last three years
  static constexpr std::uint32_t kMostPosition = (1u << kPositionBits) - 1;

  DEEP_EP_HOST_DEVICE static constexpr std::uint64_t at(std::uint64_t call, std::uint32_t position = 0) {
    return call << kPositionBits | position;
  }
  DEEP_EP_HOST_DEVICE static constexpr std::uint64_t call_of(std::uint64_t word) { return word >> kPositionBits; }
  /// The part that each of `parts` blocks adds to a word, which has moved on by a call when all have; one is the
  /// `first`. `parts`: an int or a Divisor, 1 or more.
  DEEP_EP_DEVICE static std::uint64_t part_of_call(const auto& parts, bool first) {
    const auto part = static_cast<std::uint64_t>(static_cast<int>(kMostPosition) / parts);
    return first ? at(1) - part * static_cast<std::uint32_t>(parts - 1) : part;
  }
};

/// Which of the words `agreed` of ranks that meet is the number of rows to a peer, as the handle has it; behind it are
/// those from the peer. Before it: bytes of a row, number of scales, top-k, maximum of tokens, and a number made of all
/// else (of combine in the elastic interface 1 with weights, plus 2 if each selection's row travels; of dispatch 1 if a
/// handle says where rows go).
constexpr int kAgreedRowsToPeer = 5;

/// The places of a rank's rows of a combine: offsets in its heap.
struct CombineAddresses {
  std::uint64_t x, topk_weights;
  std::int32_t num_rows;
  std::int32_t pulled;     ///< others read its rows at x; else it pushes them into their local rings
  std::int32_t agreed[7];  ///< as the reader should see it
};

/// A rank sends this when it comes to a call, if the call sends nothing else.
struct alignas(std::uint64_t) Arrival {
  std::int32_t agreed[5];
};

/// What must agree between ranks before rows may move.
struct CallShape {
  static constexpr int kWords = 8;
  /// x row bytes, bytes of a row's scales, top-k, bytes of a top-k index (0: none), experts, dtypes of x and of its
  /// scales, whether there are weights
  std::int32_t word[kWords];
};

/// A rank sends this when it comes to a dispatch of the second interface in one node.
struct alignas(std::uint64_t) DispatchArrival {
  std::int32_t agreed[5];
  std::int32_t num_tokens;
  CallShape shape;  ///< of a fresh one
};

/// What the host waits for in a dispatch with exact sizes. In memory that host and kernel share.
struct HostCounts {
  std::uint64_t epoch;  ///< stored last, with release order
  std::int32_t num_recv_tokens;
  std::int32_t num_relay_rows;        ///< between nodes: tokens that come through this rank from other nodes
  std::int32_t tokens_per_expert[1];  ///< [local experts], aligned as asked; allocated behind the struct
};

}  // namespace deep_ep
