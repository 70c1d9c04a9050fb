// Stream-ordered memory of one GPU, from a pool of our own that gives nothing back to the driver unless asked to
// (trim), or when there is no memory left: once warm, neither allocating nor freeing calls into the operating system.
//
// Memory and CUDA graphs: an allocation recorded as a graph node would have to be freed before the graph may run again,
// and a tensor that the caller keeps is not. So memory asked for during a recording is taken at once, outside of the
// graph, which then finds it at the same address in every replay; and memory that was given back or taken during a
// recording is kept until the executor goes, because replays keep using it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_set>

#include "csrc/executor/cuda/context.hpp"

namespace deep_ep::cuda {

/// The context must be current in each call.
class StreamMemory {
 public:
  explicit StreamMemory(std::shared_ptr<const Context> context);
  ~StreamMemory();
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;

  void* allocate(std::size_t bytes, cudaStream_t stream);
  void free(void* memory, cudaStream_t stream);
  /// Bytes that the driver got back.
  std::size_t trim();

 private:
  void close() noexcept;
  void* take(std::size_t bytes, cudaStream_t stream);
  std::size_t reserved() const;
  void* allocate_for_graph(std::size_t bytes);

  std::shared_ptr<const Context> context_;
  cudaMemPool_t pool_ = nullptr;
  cudaStream_t outside_ = nullptr;  ///< never records, so work on it is not part of any graph
  std::mutex mutex_;
  std::unordered_set<void*> kept_;  ///< memory that graphs may use
};

}  // namespace deep_ep::cuda
