// One rank of the low-latency benchmarks: its buffer, its inputs, its calls, and whether their results are right.
#pragma once

#include <optional>

#include "deep_ep/buffer.hpp"
#include "oracle/low_latency.hpp"
#include "tools/bench/world.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {

class LowLatencyRank {
 public:
  /// Collective. The task must outlive the object; its shape's tokens are also max_tokens. `base`: all options of the
  /// buffer but sizes. `weights`: dispatches bring those of combine.
  LowLatencyRank(const RankTask& task, const BufferOptions& base, bool weights = false);

  StreamHandle stream() const { return stream_; }
  Buffer& buffer() { return buffer_; }

  // Each enqueues its kernels on the stream (with `hook`, the send part) and is collective.
  LowLatencyDispatchResult dispatch(oracle::RowFormat format, bool hook = false);
  /// With identity experts: sums of a token's own row, with weights of 1, so that sums of small whole numbers are
  /// exact.
  LowLatencyCombineResult combine(bool hook = false);
  /// Prepares what combine needs: rows where the experts' output would be.
  void receive_for_combine();

  /// Overwrites the inputs of the calls, so that a call that still saw an earlier one's rows would be detected; and
  /// restores them. `restore` is collective.
  void spoil();
  void restore();

  // Each throws Error at the first difference from what the oracle says.
  /// Every valid row with its scales, counts, ranges and token indices, bit for bit.
  void check_dispatched(oracle::RowFormat format, const LowLatencyDispatchResult& result);
  /// Every sum, bit for bit; of calls with hooks, and where rows may go by rails, as far as roundings explain.
  void check_combined(const LowLatencyCombineResult& result);

  /// Collective; the object must not be used any more.
  void destroy();

 private:
  const WorkloadShape& shape_;
  int rank_;
  bool gives_weights_;
  Executor& executor_;
  OwnStream stream_;
  Buffer buffer_;
  DeviceTensor x_;
  DeviceTensor selection_;
  DeviceTensor weights_;
  DeviceTensor global_scale_;
  LowLatencyHandle handle_;
  std::optional<DeviceTensor> rows_;  // where the experts' output would be
};

}  // namespace deep_ep::tools
