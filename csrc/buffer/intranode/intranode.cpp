#include "csrc/buffer/intranode/intranode.hpp"

namespace deep_ep {

Intranode::Intranode(Runtime& runtime)
    : runtime_(runtime),
      setup_{.num_ranks = runtime.num_ranks(),
             .max_local_experts = runtime.options().max_local_experts,
             .device = runtime.device(),
             .policy = runtime.policy(),
             .reject_unknown_experts = runtime.options().reject_unknown_experts,
             .heap_bytes = runtime.heap()->bytes(),
             .window_bytes = runtime.layout().window_bytes,
             .max_window_tokens = runtime.layout().control.max_window_tokens()},
      state_(runtime.zeroed_memory<KernelState>()),
      host_counts_(pinned_memory<HostCounts>(
          runtime.executor(),
          sizeof(HostCounts) + sizeof(std::int32_t) * static_cast<std::size_t>(setup_.max_local_experts))) {
  common_.rank = runtime.rank();
  common_.num_ranks = runtime.num_ranks();
  common_.heaps = runtime.heap()->device_peers();
  common_.control = runtime.layout().control;
  common_.state = state_.get();
}

}  // namespace deep_ep
