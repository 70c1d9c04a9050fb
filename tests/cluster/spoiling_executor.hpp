// An executor with which what is posted to one peer fails.
#pragma once

#include <cstring>
#include <vector>

#include "kernels/rdma/params.hpp"
#include "tests/cluster/counting_executor.hpp"

namespace deep_ep::test {

/// Gives kernels a wrong key for one peer's heap, over one channel of a mode, the first time they get any.
class SpoilingExecutor final : public CountingExecutor {
 public:
  template <class Channel>
  SpoilingExecutor(const std::shared_ptr<Executor>& inner, int ranks, Channel channel, int peer)
      : SpoilingExecutor(inner, ranks, static_cast<int>(Channel::count), static_cast<int>(channel), peer) {}
  /// Where a mode has so many channels.
  SpoilingExecutor(const std::shared_ptr<Executor>& inner, int ranks, int channels, int channel, int peer)
      : CountingExecutor(inner),
        entries_(static_cast<std::size_t>(channels) * static_cast<std::size_t>(ranks)),
        entry_(static_cast<std::size_t>(channel * ranks + peer)) {}

  void copy(void* destination, const void* source, std::size_t bytes, StreamHandle stream) override {
    if (spoiled_ || bytes != entries_ * sizeof(RdmaPeerParams)) {
      return CountingExecutor::copy(destination, source, bytes, stream);
    }
    std::vector<RdmaPeerParams> table(entries_);
    std::memcpy(table.data(), source, bytes);
    spoiled_ = table[entry_].queue.ring != nullptr;  // else it is the table of a mode that has no queue pairs
    table[entry_].remote_key ^= 0xffu;
    table[entry_].signal_key ^= 0xffu;
    CountingExecutor::copy(destination, table.data(), bytes, stream);
    synchronize(stream);
  }

 private:
  std::size_t entries_, entry_;
  bool spoiled_ = false;
};

}  // namespace deep_ep::test
