// What kernels need to agree on which rank is lost: see kernels/common/watch.hpp.
#pragma once

#include <memory>

#include "csrc/executor/backend.hpp"
#include "csrc/memory/node_membership.hpp"
#include "csrc/memory/symmetric_heap.hpp"
#include "kernels/common/place.hpp"
#include "kernels/common/watch.hpp"

namespace deep_ep {

class LostRanks {
 public:
  /// `board`: in the heap of every rank. `masks`: low-latency calls go on without lost ranks.
  LostRanks(std::shared_ptr<Executor> executor, StreamHandle stream, const SymmetricHeap& heap, Place<WaitBoard> board,
            const NodeMembership& nodes, bool masks);

  /// For kernels.
  WaitWatch* watch() const { return watch_.get(); }
  /// While no rank of the node has a call under way: nobody is lost any more.
  void forget() const;

 private:
  std::shared_ptr<Executor> executor_;
  StreamHandle stream_;
  WaitBoard* own_;
  WaitWatch fresh_{};
  std::shared_ptr<WaitWatch> watch_;  ///< device memory
};

}  // namespace deep_ep
