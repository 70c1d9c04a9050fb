// Parts that only GPUs have: CUDA graphs, and NCCL to compare with.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::tools {

/// Work of a stream, recorded once and started again by one launch.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual void launch(StreamHandle stream) = 0;
};

/// Records what `enqueue` puts on the stream. All that the work refers to must outlive the graph. nullptr where the
/// executor has no graphs.
std::unique_ptr<Graph> record_graph(Executor& executor, StreamHandle stream, const std::function<void()>& enqueue);

/// NCCL's grouped send and receive, the usual way to exchange tokens without a library of this kind. Made, called and
/// destroyed collectively.
class NcclTransport {
 public:
  virtual ~NcclTransport() = default;
  virtual std::string name() const = 0;  ///< with its version
  /// Fixes how many bytes go where; `send[r]` to rank r, `receive[r]` from rank r.
  virtual void prepare(std::span<const std::int64_t> send, std::span<const std::int64_t> receive) = 0;
  /// Enqueues one exchange on `stream`.
  virtual void enqueue(StreamHandle stream) = 0;
};
/// nullptr where the build or the executor has no such thing.
std::unique_ptr<NcclTransport> make_nccl_transport(Bootstrap& bootstrap, Executor& executor);

}  // namespace deep_ep::tools
