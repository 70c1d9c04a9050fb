// CUDA graphs, to measure what a replay costs.
#pragma once

#include <functional>
#include <memory>

#include "deep_ep/executor.hpp"

namespace deep_ep::tools {

/// Work of a stream, recorded once and started again by one launch.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual void launch(StreamHandle stream) = 0;
};

/// Records what `enqueue` puts on the stream. What that work refers to must outlive the graph. nullptr where the
/// executor has no graphs.
std::unique_ptr<Graph> record_graph(Executor& executor, StreamHandle stream, const std::function<void()>& enqueue);

}  // namespace deep_ep::tools
