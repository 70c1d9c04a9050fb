// A local ring: rows of a call, numbered from 0, pass from one rank of a node to another.
//
//   writer                                     reader
//   acquire: row n - slots has been released
//   stores row n
//   publish: `published` of the slot, there    await: `published` of the slot
//                                              reads row n
//                                              release: `released` of the slot, there
//
// Each slot has its words, so that several warps may write and read rows of one ring at once.
#pragma once

#include "kernels/internode/serving.hpp"
#include "kernels/normal/row_copy.hpp"

namespace deep_ep::device::internode {

/// One end of a ring. In dispatch a rank has a ring from each rank of its node, in combine one from each such rank for
/// each node whose tokens the rows are of.
struct TokenRing {
  const TransferParams& params;
  std::uint64_t call;  ///< number, from 0
  int peer;            ///< index, in this node, of the rank at the other end
  int here, there;     ///< the ring's number at this end, and at the other

  DEEP_EP_DEVICE const InternodeParams& common() const { return params.common; }
  DEEP_EP_DEVICE const LocalRings& rings() const { return params.local; }
  DEEP_EP_DEVICE AwaitedWord word_here(Wanted wanted, const std::uint64_t* words, std::int32_t n,
                                       std::int32_t through) const {
    return {{common().grid.first_of_node() + peer, wanted, Rings::through(call, through)},
            words + rings().slot_of(here, n)};
  }

  // The writer's end.

  /// The word that must come before row `n` may be stored.
  DEEP_EP_DEVICE AwaitedWord room(std::int32_t n) const {
    return word_here(Wanted::internode_near_room, common().window.released(common().own_heap()), n, n - rings().slots);
  }
  DEEP_EP_DEVICE bool has_room(std::int32_t n) const { return n < rings().slots || room(n).is_reached(); }
  /// By a whole warp. False after a fault.
  DEEP_EP_DEVICE bool acquire(std::int32_t n) const {
    return n < rings().slots || room(n).await<WholeWarp>(params.wait);
  }
  DEEP_EP_DEVICE std::byte* slot_there(std::int32_t n) const {
    return rings().slot(there, n).in(common().heap_of(peer));
  }
  /// By a whole warp, which has stored row `n`.
  DEEP_EP_DEVICE void publish(std::int32_t n) const {
    warp::sync();  // the lanes' stores come before the word
    if (lane_index() != 0) return;
    store_release<Scope::system>(common().window.published(common().heap_of(peer)) + rings().slot_of(there, n),
                                 Rings::through(call, n));
  }

  // The reader's end.

  /// The word that says that row `n` is there.
  DEEP_EP_DEVICE AwaitedWord row(std::int32_t n) const {
    return word_here(Wanted::internode_near_rows, common().window.published(common().own_heap()), n, n);
  }
  DEEP_EP_DEVICE std::byte* slot(std::int32_t n) const { return rings().slot(here, n).in(common().own_heap()); }
  /// By one lane, when the whole warp has read row `n`.
  DEEP_EP_DEVICE void release(std::int32_t n) const {
    store_release<Scope::system>(common().window.released(common().heap_of(peer)) + rings().slot_of(there, n),
                                 Rings::through(call, n));
  }
};

}  // namespace deep_ep::device::internode
