// The memory of a rank's queue pairs: what kernels fill, and whoever executes reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/executor/own_stream.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep::rdma {

struct RingOptions {
  std::size_t count = 1;       ///< of queue pairs
  std::uint32_t depth = 1024;  ///< entries; a power of two from 64 to 32768
  std::uint32_t batch = 32;    ///< entries after which a kernel rings unasked, 1 to depth / 2
  bool on_gpu = false;         ///< in the executor's device memory, otherwise in pinned memory of the host
  std::size_t alignment = 64;  ///< of each queue pair's memory
  bool records_apart = false;  ///< doorbell records lie in pinned memory, on pages of their own

  // The memory of one queue pair begins with its ring. What one writes and what another writes are in lines of their
  // own.
  static constexpr std::size_t kLine = 128;
  /// The offset of the one completion entry, in bytes.
  std::size_t completion() const { return std::size_t{depth} * sizeof(device::rdma::WorkQueueEntry); }
  /// The doorbell record of an mlx5 queue pair, 4 bytes for receiving (unused), then 4 for sending; 64 bytes further,
  /// the record of its completion queue, which nobody writes.
  std::size_t doorbell() const { return completion() + kLine; }
  std::size_t bytes() const { return (doorbell() + kLine + alignment - 1) / alignment * alignment; }
};

/// What the memory of one queue pair says of its work.
struct RingStatus {
  RdmaQueueState state{};
  device::rdma::CompletionEntry completion{};

  /// A kernel, or the completion entry, says that it has failed.
  bool failed() const;
  /// Entries posted that are not known to be complete.
  std::uint32_t outstanding() const;
  bool done() const { return failed() || outstanding() == 0; }
};

/// Filled in as the first kernel must find it: no completion, nothing posted. The owners' indices are in device memory
/// wherever the rings are; producer indices, which threads read, lie side by side in pinned memory.
class RingMemory {
 public:
  RingMemory(std::shared_ptr<Executor> executor, const RingOptions& options);
  RingMemory(const RingMemory&) = delete;
  RingMemory& operator=(const RingMemory&) = delete;

  const RingOptions& options() const { return options_; }

  device::rdma::WorkQueueEntry* ring(std::size_t i) const {
    return reinterpret_cast<device::rdma::WorkQueueEntry*>(begin(i));
  }
  device::rdma::CompletionEntry* completion(std::size_t i) const {
    return reinterpret_cast<device::rdma::CompletionEntry*>(begin(i) + options_.completion());
  }
  std::uint64_t* producer_index(std::size_t i) const {
    return reinterpret_cast<std::uint64_t*>(pages_ + record_bytes()) + i;
  }
  RdmaQueueState* state(std::size_t i) const { return states_.get() + i; }
  std::uint32_t* doorbell_record(std::size_t i) const {
    std::byte* const both =
        options_.records_apart ? records() + 2 * sizeof(std::uint32_t) * i : begin(i) + options_.doorbell();
    return reinterpret_cast<std::uint32_t*>(both) + 1;
  }
  /// Where records lie apart.
  std::byte* records() const { return pages_; }
  std::size_t record_bytes() const;

  /// Does the host reach the rings, or only their device?
  bool host_reads() const;
  /// Of all queue pairs. No kernel may be posting.
  std::vector<RingStatus> status() const;

 private:
  std::byte* begin(std::size_t i) const { return rings_ + i * options_.bytes(); }

  std::shared_ptr<Executor> executor_;
  OwnStream stream_;  ///< for transfers
  RingOptions options_;
  std::shared_ptr<std::byte> allocation_;
  std::byte* rings_ = nullptr;
  std::shared_ptr<RdmaQueueState> states_;
  std::shared_ptr<std::byte> pinned_;
  std::byte* pages_ = nullptr;  ///< of it: records that lie apart, producer indices
};

}  // namespace deep_ep::rdma
