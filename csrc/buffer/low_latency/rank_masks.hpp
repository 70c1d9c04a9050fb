// Which ranks low-latency calls leave out, in this rank's opinion, or as all agree: kernels mask ranks that are late,
// and the program may mask and unmask.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "csrc/buffer/runtime.hpp"
#include "csrc/memory/process_identity.hpp"
#include "kernels/low_latency/params.hpp"

namespace deep_ep {

/// What ranks need to know of each other to agree on who is lost. Plain data.
struct MaskingRank {
  ProcessIdentity process;
  bool reaches_board = false;  ///< its kernels may compare and exchange words in rank 0's memory
};

/// Why ranks cannot agree, though all map each other's memory; empty: they can.
std::string why_own_masks(std::span<const MaskingRank> ranks);

class RankMasks {
 public:
  /// `state`: where 0 and 1 are copied from. It outlives the masks.
  RankMasks(Runtime& runtime, const LowLatencyState* state);

  /// Ranks agree on who is lost: `change` enqueues how a rank is masked, or a rank, or all (-1), are unmasked.
  using Change = std::function<void(int rank, bool masked, StreamHandle stream)>;
  void agree_by(Change change) { change_ = std::move(change); }

  /// For kernels: LowLatencyParams::mask and ::masked.
  std::int32_t* mask() const { return mask_.get(); }
  FaultRecord* records() const { return records_.get(); }

  /// Logs which ranks kernels have masked since the last look.
  void log_new() const;

  // In the order of calls.
  void update(int rank, bool masked, StreamHandle stream);
  void query(const TensorView& status, StreamHandle stream);
  void clear(StreamHandle stream);
  /// While no call is under way; the host waits.
  void clear_now();

 private:
  std::size_t bytes() const { return static_cast<std::size_t>(runtime_.num_ranks()) * sizeof(std::int32_t); }

  Runtime& runtime_;
  const LowLatencyState* state_;
  Change change_;                         ///< empty: masks are each rank's own
  std::shared_ptr<std::int32_t> mask_;    ///< device memory, [num_ranks]
  std::shared_ptr<FaultRecord> records_;  ///< pinned, [num_ranks]
};

}  // namespace deep_ep
