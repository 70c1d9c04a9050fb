// The ranks that low-latency calls leave out: those that the control plane calls lost, and those that programs mask.
// The masks themselves are in ControlState, for kernels.
#pragma once

#include <cstddef>
#include <vector>

#include "csrc/buffer/runtime.hpp"
#include "kernels/low_latency/params.hpp"

namespace deep_ep {

class RankMasks {
 public:
  /// `wait`: of low-latency calls.
  RankMasks(Runtime& runtime, const WaitContext& wait);

  /// Logs which ranks are masked, and which queue pairs have failed, since the last look.
  void log_new();

  // In the order of calls. The program's masks are apart from verdicts, and undo none.
  void update(int rank, bool masked, StreamHandle stream);
  void query(const TensorView& status, StreamHandle stream);
  void clear(StreamHandle stream);

  /// By all ranks, between exchanges of the bootstrap, while no call is under way: forgets the verdicts so far, and
  /// which were logged.
  void resume();

 private:
  void launch(LowLatencyMasksStep step, int rank, std::int32_t* status, StreamHandle stream);

  Runtime& runtime_;
  WaitContext wait_;
  std::size_t logged_ = 0;             ///< verdicts
  std::vector<bool> failures_logged_;  ///< [num_ranks]
};

}  // namespace deep_ep
