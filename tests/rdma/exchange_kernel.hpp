// A kernel in which every rank sends rows to every other rank through its queue pairs, and checks what comes.
#pragma once

#include "kernels/common/wait.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep::test {

/// A rank sends these rows to each peer in an epoch.
struct ExchangeRows {
  int count = 70;  ///< more than fit into a ring of 64 entries: kernels must poll, and so see failures of their own
  /// Not 0: rows have lengths from 0 to 16 KiB and begin anywhere; each number gives others.
  std::uint64_t seed = 0;

  DEEP_EP_HOST_DEVICE std::uint32_t slot_bytes() const { return seed == 0 ? 256 : 16384 + 64; }
};

/// One rank's launch: a block of one warp for each peer. Heaps look alike on all ranks, see the offsets. Epochs
/// alternate between two halves of the rows, so that whoever checks an epoch is not overtaken by the next but one.
struct ExchangeParams {
  int rank = 0;
  int num_ranks = 0;
  ExchangeRows rows;
  int first_epoch = 1;  ///< counts over launches
  int epochs = 0;
  std::uint64_t astray = 0;              ///< added to where rows go: beyond the peer's heap, they fail
  const RdmaQueuePair* peers = nullptr;  ///< [num_ranks]
  std::byte* heap = nullptr;             ///< this rank's
  std::uint64_t* wrong_bytes = nullptr;
  WaitContext wait = {};

  DEEP_EP_HOST_DEVICE std::uint64_t signal(int source) const { return 8 * static_cast<std::uint64_t>(source); }
  DEEP_EP_HOST_DEVICE std::uint64_t outgoing(int peer, int epoch, int row) const { return slot(peer, epoch, row); }
  DEEP_EP_HOST_DEVICE std::uint64_t incoming(int source, int epoch, int row) const {
    return slot(num_ranks + source, epoch, row);
  }
  DEEP_EP_HOST_DEVICE std::uint64_t sink() const { return slot(2 * num_ranks, 0, 0); }
  DEEP_EP_HOST_DEVICE std::uint64_t heap_bytes() const { return sink() + 8; }

 private:
  DEEP_EP_HOST_DEVICE std::uint64_t slot(int area, int epoch, int row) const {
    const int index = (area * 2 + epoch % 2) * rows.count + row;
    return 4096 + static_cast<std::uint64_t>(index) * rows.slot_bytes();
  }
};

}  // namespace deep_ep::test

DEEP_EP_DECLARE_KERNEL(rdma_exchange, deep_ep::test::ExchangeParams, 32)
