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
          sizeof(HostCounts) + sizeof(std::int32_t) * static_cast<std::size_t>(setup_.max_local_experts))),
      lost_(pinned_memory<std::int32_t>(runtime.executor())) {
  common_.rank = runtime.rank();
  common_.num_ranks = runtime.num_ranks();
  common_.heaps = runtime.heap()->device_peers();
  common_.control = runtime.layout().control;
  common_.state = state_.get();
}

int Intranode::find_lost_rank(int waited_for, int cut_off_from, bool search) {
  if (runtime_.num_ranks() <= 2) return waited_for;
  // A rank that has failed may have freed its heap, which is gone for the others, too, if they share it so.
  if (runtime_.heap()->kind() == HeapKind::cuda_ipc) return waited_for;
  const double for_s = search ? time_to_find_lost_s(runtime_.timeout_s()) : 0;
  *lost_ = waited_for;
  const LostRankParams params{.common = common_,
                              .waited_for = waited_for,
                              .cut_off_from = cut_off_from,
                              .for_ns = static_cast<std::uint64_t>(for_s * 1e9),
                              .lost = lost_.get()};
  Backend& executor = *runtime_.executor();
  executor.make_current();
  executor.kernels().find_lost_rank(params, {1, 32, 0}, runtime_.comm_stream());
  executor.synchronize(runtime_.comm_stream());
  return *lost_;
}

}  // namespace deep_ep
