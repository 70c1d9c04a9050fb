#include "csrc/buffer/lost_ranks.hpp"

#include <utility>

#include "csrc/memory/executor_memory.hpp"

namespace deep_ep {

LostRanks::LostRanks(std::shared_ptr<Executor> executor, StreamHandle stream, const SymmetricHeap& heap,
                     Place<WaitBoard> board, const NodeMembership& nodes, bool masks)
    : executor_(std::move(executor)),
      stream_(stream),
      own_(board.in(heap.local())),
      watch_(device_memory<WaitWatch>(executor_)) {
  fresh_.rank = nodes.rank;
  fresh_.masks = masks;
  fresh_.beat = &own_->beat;
  const auto heaps = heap.peers();
  for (int rank = 0; rank < static_cast<int>(nodes.node.size()); ++rank) {
    std::byte* const mapped = heaps[static_cast<std::size_t>(rank)];
    if (!nodes.same_node(rank) || mapped == nullptr) continue;
    WaitBoard* const theirs = board.in(rank == nodes.rank ? heap.local() : mapped);
    fresh_.peers[rank].beat = &theirs->beat;
    if (fresh_.entries == nullptr) fresh_.entries = theirs->entries;
  }
  forget();
}

void LostRanks::forget() const {
  executor_->fill(own_->entries, 0, sizeof own_->entries, stream_);
  executor_->copy(watch_.get(), &fresh_, sizeof fresh_, stream_);
  executor_->synchronize(stream_);
}

}  // namespace deep_ep
