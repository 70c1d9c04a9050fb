// What a run of the size that the doctor counts for needs of its machine, for each limit that could stop it.
#pragma once

#include <cstdint>
#include <string>

#include "tools/common/buffer_sizes.hpp"

namespace deep_ep::tools {

struct Patient;

struct Needs {
  BufferSizes run;                 ///< whole nodes, experts shared out evenly
  std::uint64_t buffer_bytes = 0;  ///< of a rank: heap and rings, where the heap is: on the GPU, if there is one
  std::uint64_t locked_bytes = 0;  ///< of a rank: host memory that NICs register
  std::uint64_t shared_bytes = 0;  ///< of a node, in /dev/shm
  std::uint64_t host_bytes = 0;    ///< of a node: all that counts against the memory of the host
  std::uint64_t open_files = 0;    ///< of rank 0, which has most
  std::uint64_t threads = 0;       ///< of a node
  std::uint64_t queue_pairs = 0;   ///< of a rank
  std::uint64_t rdma_objects = 0;  ///< of a rank, as the kernel counts them: queue pairs, completion queues, ...

  std::string text() const;  ///< "16 ranks, 8 a node, 4096 tokens of 7168 channels"
};
Needs needs_of(const Patient& patient);

}  // namespace deep_ep::tools
