// Shared memory of a block of the low-latency dispatch.
#pragma once

#include "kernels/low_latency/transport/masks.hpp"

namespace deep_ep {

struct LowLatencyDispatchShared {
  int num_ranks;
  int num_experts;
  std::uint32_t stage_bytes;  ///< 0: nothing is sent

  struct Words {
    std::uint64_t sent, received;  ///< see Epochs
    device::MaskWords masks;
    std::int32_t destinations;  ///< of the token under way
    std::int32_t staged;        ///< one of them is the staging memory, for ranks that are reached by RDMA
    std::int32_t failed;        ///< a wait was called off: the call is over
  };

  DEEP_EP_HOST_DEVICE Words& words(std::byte* memory) const { return *reinterpret_cast<Words*>(memory); }
  /// Where the token under way goes: its row in the window of each rank that gets it.
  DEEP_EP_HOST_DEVICE std::byte** destinations(std::byte* memory) const {
    return reinterpret_cast<std::byte**>(memory + sizeof(Words));
  }
  /// Every rank's heap.
  DEEP_EP_HOST_DEVICE std::byte** heaps(std::byte* memory) const {
    return destinations(memory) + LowLatencyWindow::kMostTopk;
  }
  /// Sending: what each rank had acknowledged when the block began.
  DEEP_EP_HOST_DEVICE std::uint64_t* acknowledged(std::byte* memory) const {
    return reinterpret_cast<std::uint64_t*>(heaps(memory) + num_ranks);
  }
  /// Not 0: nothing goes to this rank, nothing is expected of it.
  DEEP_EP_HOST_DEVICE std::int32_t* left_out(std::byte* memory) const {
    return reinterpret_cast<std::int32_t*>(acknowledged(memory) + num_ranks);
  }
  /// Sending: tokens counted so far that go to each rank. Receiving: rows of each source.
  DEEP_EP_HOST_DEVICE std::uint32_t* rows(std::byte* memory) const {
    return reinterpret_cast<std::uint32_t*>(left_out(memory) + num_ranks);
  }
  /// Sending: entries counted so far that name each expert. Receiving, [rank][local expert]: rows that each source has
  /// for each of our experts, then where they begin.
  DEEP_EP_HOST_DEVICE std::uint32_t* entries(std::byte* memory) const { return rows(memory) + num_ranks; }
  /// By rails, receiving: rows of each source that this rank hands on.
  DEEP_EP_HOST_DEVICE std::uint32_t* relayed(std::byte* memory) const { return entries(memory) + num_experts; }
  /// By rails, in blocks that post: tokens counted so far that go to each node.
  DEEP_EP_HOST_DEVICE std::uint32_t* to_nodes(std::byte* memory) const { return relayed(memory); }

  /// In blocks that post, instead of a row.
  DEEP_EP_HOST_DEVICE std::byte* poster_words(std::byte* memory) const { return memory + stage_at(); }
  DEEP_EP_HOST_DEVICE std::size_t poster_bytes(int warps) const {
    return stage_at() + static_cast<std::size_t>(warps) * sizeof(LowLatencyPosterWords);
  }

  /// The row to send, without tags.
  DEEP_EP_HOST_DEVICE std::byte* stage(std::byte* memory) const { return memory + stage_at(); }
  DEEP_EP_HOST_DEVICE std::size_t bytes() const { return stage_at() + stage_bytes; }

 private:
  DEEP_EP_HOST_DEVICE std::size_t stage_at() const {
    const std::size_t end = sizeof(Words) + LowLatencyWindow::kMostTopk * sizeof(std::byte*) +
                            static_cast<std::size_t>(num_ranks) * (sizeof(void*) + 8 + 4 + 4 + 4) +
                            static_cast<std::size_t>(num_experts) * 4;
    return align_to_line(end);
  }
};

}  // namespace deep_ep
