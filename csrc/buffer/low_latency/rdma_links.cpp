#include "csrc/buffer/low_latency/rdma_links.hpp"

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep {

RdmaLinks::RdmaLinks(Runtime& runtime)
    : runtime_(runtime),
      far_(runtime.low_latency_reach().far),
      connections_(runtime.take_connections(BufferPlan::kLowLatency)) {
  const auto ranks = static_cast<std::size_t>(runtime.num_ranks());
  const auto mapped = runtime.heap()->peers();
  std::vector<std::byte*> heaps(mapped.begin(), mapped.end());
  for (const int far : far_) heaps[static_cast<std::size_t>(far)] = nullptr;
  agree(runtime.bootstrap(), "allocating memory for low-latency calls between nodes", [&] {
    told_ = runtime.zeroed_memory<LowLatencyTold>(ranks * sizeof(LowLatencyTold));
    heaps_ = device_memory<std::byte*>(runtime.executor(), ranks * sizeof(std::byte*));
    runtime.executor()->copy(heaps_.get(), heaps.data(), ranks * sizeof(std::byte*), runtime.comm_stream());
    runtime.executor()->synchronize(runtime.comm_stream());
  });
  log::info("buffer: rank {} in low-latency calls: {}", runtime.rank(), describe());
}

std::string RdmaLinks::describe() const {
  return fmt::format("{} of {} ranks are reached by RDMA, {}: {}", far_.size(), runtime_.num_ranks(),
                     runtime_.low_latency_reach().describe_rails(), connections_->describe());
}

void RdmaLinks::add_to(LowLatencyParams& params) const {
  params.peers = connections_->device_peers();
  params.told = told_.get();
  params.staging = runtime_.layout().staging;
  params.lanes = runtime_.low_latency_reach().lanes;
  for (const int far : far_) params.set_far(far);
}

void RdmaLinks::resume(const LowLatencyCounts& counts) {
  connections_->reconnect(runtime_.bootstrap());  // what was under way is lost: nobody adds any more
  LowLatencyTold told{};
  told.barrier = counts.barriers;
  for (std::size_t kind = 0; kind < counts.calls.size(); ++kind) {
    const std::uint64_t calls = counts.calls[kind];
    const std::uint64_t progress = LowLatencyMailbox::progress_value(calls, 0);
    told.mailbox[kind] = {.acknowledged = calls, .begun = calls, .progress = {}};
    for (auto& of_lane : told.mailbox[kind].progress) of_lane[0] = of_lane[1] = progress;
  }

  // Both ends of every word: what this rank has told, and what it has been told.
  Executor& executor = *runtime_.executor();
  const LowLatencyWindow& window = runtime_.layout().low_latency;
  const auto set = [&](auto place, const auto& value) {
    executor.copy(place.in(runtime_.heap()->local()), &value, sizeof value, runtime_.comm_stream());
  };
  for (const int far : far_) {
    executor.copy(told_.get() + far, &told, sizeof told, runtime_.comm_stream());
    set(window.barrier(far), told.barrier);
    for (const LowLatencyKind kind : {LowLatencyKind::dispatch, LowLatencyKind::combine}) {
      set(window.mailbox(kind, far), told.mailbox[static_cast<std::size_t>(kind)]);
    }
  }
  executor.synchronize(runtime_.comm_stream());
}

}  // namespace deep_ep
