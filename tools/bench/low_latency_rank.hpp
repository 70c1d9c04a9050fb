// One rank of the low-latency benchmarks: its buffer, its inputs, and the calls that are measured.
#pragma once

#include <memory>
#include <optional>

#include "deep_ep/buffer.hpp"
#include "oracle/low_latency.hpp"
#include "tools/bench/workload.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {

/// How combine gets its rows and sends them.
enum class LowLatencyCombine { plain, zero_copy, fp8 };
const char* name_of(LowLatencyCombine kind);

/// How ranks reach each other.
struct LowLatencyReach {
  int ranks_per_node = 0;  ///< 0: as the machine has it
  bool nvlink = true;      ///< false: all by RDMA
  LowLatencyRails rails = LowLatencyRails::automatic;
};

class LowLatencyBench {
 public:
  /// Collective. `shape` must outlive the object; its tokens are also max_tokens.
  LowLatencyBench(const WorkloadShape& shape, const std::shared_ptr<Bootstrap>& bootstrap,
                  const std::shared_ptr<Executor>& executor, const LowLatencyReach& reach = {});

  StreamHandle stream() const { return stream_; }
  Buffer& buffer() { return buffer_; }

  // Each enqueues its kernels on the stream (with `hook`, the send part) and is collective.
  LowLatencyDispatchResult dispatch(oracle::RowFormat format, bool hook = false);
  LowLatencyDispatchResult dispatch(bool fp8, bool hook = false) {
    return dispatch(fp8 ? oracle::RowFormat::fp8 : oracle::RowFormat::bf16, hook);
  }
  /// From now on dispatches are given arrival counters, a word for 64 rows.
  void count_arrivals();
  /// With identity experts: sums of a token's own row, with weights of 1, so that sums of small whole numbers are
  /// exact.
  LowLatencyCombineResult combine(LowLatencyCombine kind, bool hook = false);
  /// Prepares what combine needs: rows where the experts' output would be.
  void receive_for_combine();

  /// Overwrites the inputs of the calls, so that a call that still saw an earlier one's rows would be detected; and
  /// restores them. `restore` is collective.
  void spoil();
  void restore();

  /// Collective; the object must not be used any more.
  void destroy();

 private:
  static BufferOptions buffer_options(const WorkloadShape& shape, const LowLatencyReach& reach);
  void fill_inputs(int rank);

  const WorkloadShape& shape_;
  Executor& executor_;
  Stream stream_;
  Buffer buffer_;
  DeviceTensor x_;
  DeviceTensor kept_x_;
  DeviceTensor selection_;
  DeviceTensor weights_;
  DeviceTensor global_scale_;
  std::optional<DeviceTensor> arrivals_;
  LowLatencyHandle handle_;
  std::optional<DeviceTensor> rows_;  // where the experts' output would be
};

}  // namespace deep_ep::tools
