#include "csrc/buffer/line_check.hpp"

#include <cstdint>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/memory/executor_memory.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep {
namespace {

constexpr int kLineTestThreads = 256;  // of a block: a warp for each peer

/// Counts of torn and of late peers: [2][ranks].
std::vector<std::uint32_t> run_line_test(const std::shared_ptr<Backend>& executor, StreamHandle stream,
                                         LineTestParams params, Launcher<LineTestParams> kernel) {
  const auto ranks = static_cast<std::size_t>(params.num_ranks);
  std::vector<std::uint32_t> counts(2 * ranks, 0);
  const std::size_t bytes = counts.size() * sizeof(std::uint32_t);
  const auto memory = device_memory<std::uint32_t>(executor, bytes);
  params.torn = memory.get();
  params.late = memory.get() + ranks;
  executor->fill(memory.get(), 0, bytes, stream);
  const int warps = kLineTestThreads / 32;
  kernel(params, LaunchShape{(params.num_ranks + warps - 1) / warps, kLineTestThreads, 0}, stream);
  executor->copy(counts.data(), memory.get(), bytes, stream);
  executor->synchronize(stream);
  return counts;
}

}  // namespace

void check_lines(Bootstrap& bootstrap, const std::shared_ptr<Backend>& executor, const SymmetricHeap& heap,
                 StreamHandle stream, const LineCheck& check) {
  const int num_ranks = bootstrap.size();
  const std::size_t bytes = LineTestParams::bytes(num_ranks);
  LineTestParams params{};
  agree(bootstrap, "preparing to try the memory that ranks share", [&] {
    if (heap.bytes() < bytes) {
      fail<InvalidArgument>("the heap has {}, at least {} are needed", format_bytes(heap.bytes()), format_bytes(bytes));
    }
    executor->make_current();
    executor->load_kernels();  // none of them may wait for one that waits for it
    params = {.rank = bootstrap.rank(),
              .num_ranks = num_ranks,
              .rounds = check.rounds,
              .heaps = heap.device_peers(),
              .begin = (heap.bytes() - bytes) / kTaggedLine * kTaggedLine,
              .timeout_ns = static_cast<std::uint64_t>(check.timeout_s * 1e9),
              .torn = nullptr,
              .late = nullptr};
  });
  bootstrap.barrier();  // a kernel that waits for another rank's must not wait for that one to be loaded
  const Launcher<LineTestParams> kernel = check.kernel != nullptr ? check.kernel : executor->kernels().line_test;
  agree(bootstrap, "trying whether lines of 128 bytes arrive whole", [&] {
    const std::vector<std::uint32_t> counts = run_line_test(executor, stream, params, kernel);
    for (int peer = 0; peer < num_ranks; ++peer) {
      const auto p = static_cast<std::size_t>(peer);
      if (counts[p] != 0) {
        fail<SystemError>(
            "lines of 128 bytes that rank {} stores do not arrive whole in the memory of rank {} ({} of {}), and "
            "low-latency calls rely on that: set DEEP_EP_MNNVL=off, so that they reach ranks of other hosts by RDMA",
            peer, bootstrap.rank(), counts[p], check.rounds);
      }
      if (counts[static_cast<std::size_t>(num_ranks) + p] != 0) {
        fail<TimeoutError>("rank {} waited {} s for lines of 128 bytes that rank {} stores into its memory",
                           bootstrap.rank(), check.timeout_s, peer);
      }
    }
  });
  bootstrap.barrier();  // no rank writes lines any more
  agree(bootstrap, "clearing the memory that ranks share", [&] {
    executor->fill(heap.local() + params.begin, 0, bytes, stream);
    executor->synchronize(stream);
  });
}

}  // namespace deep_ep
