// Low-latency calls between ranks that are reached by RDMA: their queue pairs, and what has been told over them.
#include <algorithm>
#include <exception>
#include <vector>

#include "csrc/buffer/implementation.hpp"
#include "csrc/buffer/low_latency/rails.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep {

void Buffer::Implementation::set_up_rdma() {
  rdma::ConnectionOptions connection;
  connection.peers = far_ranks_;
  connection.channels = static_cast<int>(LowLatencyChannel::count);
  connections_ = std::make_unique<rdma::Connections>(*bootstrap_, executor_, heap_, connection);

  const auto ranks = static_cast<std::size_t>(num_ranks_);
  const auto mapped = heap_->peers();
  std::vector<std::byte*> heaps(mapped.begin(), mapped.end());
  for (const int far : far_ranks_) heaps[static_cast<std::size_t>(far)] = nullptr;
  low_latency_heaps_ = static_cast<std::byte**>(own(executor_->allocate(ranks * sizeof(void*)), &Executor::free));
  told_ = static_cast<LowLatencyTold*>(own(executor_->allocate(ranks * sizeof(LowLatencyTold)), &Executor::free));
  executor_->copy(low_latency_heaps_, heaps.data(), ranks * sizeof(void*), comm_stream_);
  executor_->fill(told_, 0, ranks * sizeof(LowLatencyTold), comm_stream_);
  executor_->synchronize(comm_stream_);
  log::info("buffer: rank {} reaches {} of {} ranks by RDMA in low-latency calls, {}: {}", rank_, far_ranks_.size(),
            num_ranks_, describe_rails(), connections_->describe());
}

const char* Buffer::Implementation::why_not_by_rails() const {
  if (options_.low_latency_rails == LowLatencyRails::never) return "as asked for";
  if (!options_.allow_nvlink_for_low_latency) return "as NVLink is not allowed";
  if (options_.low_latency_masking) return "as ranks may be masked";
  if (nodes_.ranks_of_each_node() < 2) return "as nodes are not all of equally many consecutive ranks, two or more";
  return nullptr;
}

std::string Buffer::Implementation::describe_rails() const {
  if (rail_width_ == 0) return fmt::format("not by rails, {}", why_not_by_rails());
  const bool always = options_.low_latency_rails == LowLatencyRails::always;
  return fmt::format("by rails between nodes of {} ranks {}", rail_width_, always ? "always" : "where they pay");
}

int Buffer::Implementation::choose_rails(const CallOptions& call, int max_tokens, int num_topk, std::size_t row_bytes,
                                         std::size_t rail_row_bytes) const {
  const std::size_t needed = static_cast<std::size_t>(max_tokens) * rail_row_bytes;
  if (rail_width_ == 0 || call.return_recv_hook || needed > low_latency_window_.source_bytes) return 0;
  const RailTraffic traffic{.ranks = num_ranks_,
                            .ranks_per_node = rail_width_,
                            .topk = num_topk,
                            .max_tokens = max_tokens,
                            .row_bytes = row_bytes,
                            .rail_row_bytes = rail_row_bytes};
  return options_.low_latency_rails == LowLatencyRails::always || rails_pay(traffic) ? rail_width_ : 0;
}

void Buffer::Implementation::drain_rdma() noexcept {
  if (connections_ == nullptr) return;
  // Longer than a NIC takes to give up a peer that is gone (about 7 s, see QueuePairOptions).
  constexpr double kLongest_s = 10;
  try {
    connections_->drain(timeout_s_ == 0 ? kLongest_s : std::min(timeout_s_, kLongest_s));
  } catch (const std::exception& error) {
    log::warn("buffer: rank {} cannot tell whether its peers have got all that it sent: {}", rank_, error.what());
  }
}

void Buffer::Implementation::resume_rdma(const std::array<std::uint64_t, 3>& counts) {
  connections_->reconnect(*bootstrap_);  // what was under way is lost: nobody adds any more
  LowLatencyTold told{};
  told.barrier = counts[0];
  for (std::size_t kind = 0; kind < queues_.size(); ++kind) {
    const std::uint64_t calls = counts[kind + 1];
    told.mailbox[kind] = {calls, calls, {progress_value(calls, 0), progress_value(calls, 0)}};
  }

  // Both ends of every word: what this rank has told, and what it has been told.
  const auto set = [&](auto place, const auto& value) {
    executor_->copy(place.in(heap_->local()), &value, sizeof value, comm_stream_);
  };
  for (const int far : far_ranks_) {
    executor_->copy(told_ + far, &told, sizeof told, comm_stream_);
    set(low_latency_window_.barrier(far), told.barrier);
    for (const LowLatencyKind kind : {LowLatencyKind::dispatch, LowLatencyKind::combine}) {
      set(low_latency_window_.mailbox(kind, far), told.mailbox[static_cast<std::size_t>(kind)]);
    }
  }
  executor_->synchronize(comm_stream_);
}

}  // namespace deep_ep
