// Parts that only GPUs have: CUDA graphs, and NCCL to compare with.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::tools {

/// Enqueues work on a stream.
using Enqueue = std::function<void(StreamHandle)>;

/// Records what `work` puts on the stream into a graph, which the result starts by one launch. All that the work refers
/// to must outlive it. Null where the executor has no graphs.
Enqueue record_graph(Executor& executor, StreamHandle stream, const std::function<void()>& work);

/// NCCL's grouped send and receive, the usual way to exchange tokens without a library of this kind.
struct NcclTransport {
  std::string name;  ///< with its version
  /// An exchange of so many bytes: `send[r]` to rank r, `receive[r]` from rank r. Collective, as each exchange is.
  std::function<Enqueue(const std::vector<std::int64_t>& send, const std::vector<std::int64_t>& receive)> exchange;
};
/// Collective. Nothing where the build or the executor has no such thing.
std::optional<NcclTransport> make_nccl_transport(Bootstrap& bootstrap, Executor& executor);

}  // namespace deep_ep::tools
