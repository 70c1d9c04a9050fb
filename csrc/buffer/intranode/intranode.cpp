#include "csrc/buffer/intranode/intranode.hpp"

#include <algorithm>

#include "csrc/executor/kernel_table.hpp"
#include "kernels/elastic/params.hpp"

namespace deep_ep {

Intranode::Intranode(Runtime& runtime)
    : runtime_(runtime),
      setup_(normal_mode_setup(runtime)),
      state_(runtime.zeroed_memory<KernelState>()),
      host_counts_(make_host_counts(runtime)) {
  common_.rank = runtime.rank();
  common_.num_ranks = runtime.num_ranks();
  common_.heaps = runtime.heap()->device_peers();
  common_.control = runtime.layout().control;
  common_.state = state_.get();
}

EventHandle Intranode::barrier(const CallOptions& call) {
  runtime_.faults().raise();
  CallScope scope(runtime_.calls(), call);
  const int most = runtime_.policy().warps_per_block * 32;
  const int threads = std::min((setup_.num_ranks + 31) / 32 * 32, std::min(most, kernels::barrier::kMaxThreads));
  runtime_.executor()->kernels().barrier({common_, runtime_.faults().wait_context()},
                                         {1, threads, sizeof(std::int32_t)}, scope.stream());
  return scope.finish();
}

}  // namespace deep_ep
