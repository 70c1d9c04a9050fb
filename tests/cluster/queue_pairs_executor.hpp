// An executor that keeps, and may change, the table of queue pairs that kernels get.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "kernels/rdma/decode.hpp"
#include "kernels/rdma/params.hpp"
#include "tests/cluster/cluster.hpp"
#include "tests/cluster/counting_executor.hpp"

namespace deep_ep::test {

/// Of a mode with so many channels, when kernels get a table for the first time.
class QueuePairsExecutor final : public CountingExecutor {
 public:
  using Change = std::function<void(QueuePairsExecutor&)>;
  QueuePairsExecutor(const std::shared_ptr<Executor>& inner, int ranks, int channels, Change change = {})
      : CountingExecutor(inner),
        ranks_(ranks),
        table_(static_cast<std::size_t>(channels * ranks)),
        change_(std::move(change)) {}

  void copy(void* destination, const void* source, std::size_t bytes, StreamHandle stream) override {
    if (noted_ || bytes != table_.size() * sizeof(RdmaQueuePair)) {
      return CountingExecutor::copy(destination, source, bytes, stream);
    }
    std::memcpy(table_.data(), source, bytes);
    // Else it is the table of a mode that has no queue pairs.
    noted_ = std::ranges::any_of(table_, [](const RdmaQueuePair& one) { return one.ring != nullptr; });
    if (noted_ && change_) change_(*this);
    CountingExecutor::copy(destination, table_.data(), bytes, stream);
    synchronize(stream);
  }

  RdmaQueuePair& at(int channel, int peer) { return table_.at(static_cast<std::size_t>(channel * ranks_ + peer)); }
  /// How many of these operations were posted. On the CPU, when all kernels have ended.
  int posted(int channel, int peer, std::uint32_t opcode) {
    const RdmaQueuePair& queue = at(channel, peer);
    require(queue.peer == peer && queue.state->posted < queue.depth, "the table of queue pairs");
    return static_cast<int>(std::count_if(queue.ring, queue.ring + queue.state->posted, [&](const auto& entry) {
      return (device::rdma::swap32(entry.segment[0].word[0]) & 0xff) == opcode;
    }));
  }

 private:
  int ranks_;
  std::vector<RdmaQueuePair> table_;
  Change change_;
  bool noted_ = false;
};

/// Operations to `peer` over this channel fail: kernels have a wrong key for its heap.
inline std::shared_ptr<Executor> spoiling_executor(const std::shared_ptr<Executor>& inner, int ranks, int channels,
                                                   int channel, int peer) {
  return std::make_shared<QueuePairsExecutor>(inner, ranks, channels, [=](QueuePairsExecutor& pairs) {
    pairs.at(channel, peer).remote_key ^= 0xffu;
    pairs.at(channel, peer).signal_key ^= 0xffu;
  });
}

}  // namespace deep_ep::test
