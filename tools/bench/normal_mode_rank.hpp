// One rank of a benchmark of normal mode: its buffer, its inputs, and the calls that are measured.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "deep_ep/buffer.hpp"
#include "tools/bench/inputs.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {

class NormalModeBench {
 public:
  /// Collective. `shape` and `routes` must outlive the object.
  NormalModeBench(const WorkloadShape& shape, const Routes& routes, const std::shared_ptr<Bootstrap>& bootstrap,
                  const std::shared_ptr<Executor>& executor);

  StreamHandle stream() const { return stream_; }
  Buffer& buffer() { return buffer_; }

  // Each enqueues its kernels on the stream; all but `layout` are collective.
  DispatchLayout layout();
  /// Dispatch along known routes.
  CachedDispatchResult cached_dispatch(bool as_8bit, const Config& config);
  /// Layout, exchange of counts (the host waits for them) and dispatch.
  DispatchResult dispatch(bool as_8bit, const Config& config);
  /// Brings back the rows that `receive_for_combine` put in place. `pull` takes them from the heap; what is pushed
  /// (between nodes: copied into the heap first) lies in ordinary memory, like the output of experts that do not know
  /// of the heap.
  CombineResult combine(CombineMode mode, const Config& config);
  void receive_for_combine(CombineMode mode);
  void release_rows();

  /// What this rank exchanges with each other one in a dispatch.
  std::vector<std::int64_t> bytes_to_peers(std::int64_t row_bytes) const;
  std::vector<std::int64_t> bytes_from_peers(std::int64_t row_bytes) const;

  /// Collective; the object must not be used any more.
  void destroy();

 private:
  static BufferOptions buffer_options(const WorkloadShape& shape);

  const WorkloadShape& shape_;
  const Routes& routes_;
  Executor& executor_;
  int rank_;
  Stream stream_;
  CallOptions call_;
  Buffer buffer_;
  RankInputs inputs_;
  DispatchHandle handle_;
  CachedDispatchResult received_;
  std::optional<DeviceTensor> ordinary_rows_;
};

/// The rows of a dispatch, as a cached one returns them.
inline CachedDispatchResult rows_of(const DispatchResult& result) {
  return {.recv_x = result.recv_x, .recv_x_scales = result.recv_x_scales, .event = result.event};
}

}  // namespace deep_ep::tools
