// What all low-latency calls share: their memory and streams, hooks, masks.
#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/implementation.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"
#include "kernels/low_latency/combine/wire.hpp"

namespace deep_ep {

std::size_t Buffer::low_latency_bytes_hint(int max_tokens, std::int64_t hidden, int num_ranks, int num_experts) {
  check_range("max_tokens", max_tokens, 1, kMostLowLatencyTokens);
  check_range("hidden", hidden, 1, std::int64_t{1} << 24);
  check_range("num_ranks", num_ranks, 1, kMaxRanks);
  check_range("num_experts", num_experts, 1, 1 << 20);
  // The largest rows: bfloat16 with as many selections as there may be; LogFMT where nothing is encoded.
  const LowLatencyRow row{static_cast<int>(hidden), kMaxTopk, false, true, true};
  const CombineWire combine{static_cast<int>(hidden), true};
  const std::size_t row_bytes = std::max(row.bytes(), combine.bytes());
  const std::size_t rows_of_source = static_cast<std::size_t>(max_tokens) * row_bytes;
  const int local_experts = std::max(BufferOptions{}.max_local_experts, num_experts / num_ranks);
  // Signals take an eighth and a little more; they grow with the whole.
  constexpr std::size_t kStep = std::size_t{1} << 20;
  const std::size_t least = std::max(LowLatencyWindow::kBytesPerSlot, std::size_t{4} * row_bytes) *
                            static_cast<std::size_t>(num_ranks) * static_cast<std::size_t>(max_tokens);
  std::size_t bytes = (least + kStep - 1) / kStep * kStep;
  while (LowLatencyWindow::make(0, bytes, num_ranks, local_experts).source_bytes < rows_of_source) bytes += kStep;
  return bytes;
}

void Buffer::Implementation::set_up_low_latency() {
  if (low_latency_window_.slots == 0 || low_latency_window_.source_bytes == 0) {
    fail<InvalidArgument>(
        "low_latency_bytes is {}, which does not even hold the signals of {} ranks with {} local experts: see "
        "Buffer::low_latency_bytes_hint",
        options_.low_latency_bytes, num_ranks_, options_.max_local_experts);
  }
  const auto ranks = static_cast<std::size_t>(num_ranks_);
  low_latency_state_ =
      static_cast<LowLatencyState*>(own(executor_->allocate(sizeof(LowLatencyState)), &Executor::free));
  LowLatencyState zero{};
  zero.one = 1;
  executor_->copy(low_latency_state_, &zero, sizeof zero, comm_stream_);
  if (options_.low_latency_masking) {
    mask_ = static_cast<std::int32_t*>(own(executor_->allocate(ranks * sizeof(std::int32_t)), &Executor::free));
    executor_->fill(mask_, 0, ranks * sizeof(std::int32_t), comm_stream_);
    masked_ =
        static_cast<FaultRecord*>(own(executor_->allocate_pinned(ranks * sizeof(FaultRecord)), &Executor::free_pinned));
  }
  executor_->synchronize(comm_stream_);
  if (!far_ranks_.empty()) set_up_rdma();
  queues_ = {std::make_shared<LowLatencyQueue>("low_latency_dispatch"),
             std::make_shared<LowLatencyQueue>("low_latency_combine")};
}

void Buffer::Implementation::require_low_latency(const char* call) const {
  if (low_latency_state_ != nullptr) return;
  fail<InvalidArgument>(
      "{} needs low-latency memory, but the buffer's low_latency_bytes is 0: see Buffer::low_latency_bytes_hint", call);
}

TensorView Buffer::Implementation::low_latency_memory() const {
  require_low_latency("low_latency_memory");
  return TensorView::contiguous(heap_->local() + low_latency_window_.begin, DType::uint8,
                                {static_cast<std::int64_t>(low_latency_window_.bytes)}, executor_->device());
}

void Buffer::Implementation::require_masking(const char* call) const {
  require_low_latency(call);
  if (mask_ == nullptr) fail<InvalidArgument>("{}: the buffer was made without low_latency_masking", call);
}

void Buffer::Implementation::look_after_low_latency() {
  raise_faults();
  for (int rank = 0; mask_ != nullptr && rank < num_ranks_; ++rank) {
    if (__atomic_load_n(&masked_[rank].written, __ATOMIC_ACQUIRE) == 0) continue;
    const FaultRecord record = masked_[rank];
    // A kernel under way may have more to tell: it writes to the record after this, or not at all.
    __atomic_store_n(&masked_[rank].written, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&masked_[rank].claimed, 0, __ATOMIC_RELEASE);
    log::warn("{}", describe_masked(record));
  }
}

LowLatencyParams Buffer::Implementation::low_latency_params() const {
  LowLatencyParams params;
  params.rank = rank_;
  params.num_ranks = num_ranks_;
  params.local = heap_->local();
  params.heaps = low_latency_heaps_ == nullptr ? heap_->device_peers() : low_latency_heaps_;
  params.window = low_latency_window_;
  params.state = low_latency_state_;
  params.wait = wait_context();
  params.wait.abort = &low_latency_state_->abort;
  params.mask = mask_;
  params.masked = masked_;
  if (connections_ != nullptr) {
    params.peers = connections_->device_peers();
    params.told = told_;
    params.staging = staging_;
    for (const int far : far_ranks_) params.set_far(far);
  }
  return params;
}

void Buffer::Implementation::check_low_latency_room(std::int64_t max_tokens, std::int64_t hidden,
                                                    std::size_t row_bytes) const {
  const std::size_t needed = static_cast<std::size_t>(max_tokens) * row_bytes;
  if (max_tokens <= low_latency_window_.slots && needed <= low_latency_window_.source_bytes) {
    return;
  }
  fail<InvalidArgument>(
      "max_tokens {} and hidden {} do not fit low_latency_bytes {}: there is room for {} tokens and {} of rows from "
      "each rank, this call has rows of {}, {} in all; Buffer::low_latency_bytes_hint says what is needed",
      max_tokens, hidden, options_.low_latency_bytes, low_latency_window_.slots,
      format_bytes(low_latency_window_.source_bytes), format_bytes(row_bytes), format_bytes(needed));
}

void Buffer::Implementation::enqueue_low_latency(LowLatencyKind kind, const CallOptions& call, LowLatencyLaunch launch,
                                                 std::function<void()>& hook) {
  if (!call.return_recv_hook) {
    launch(LowLatencyPhase::both, run_stream_);
    return;
  }
  launch(LowLatencyPhase::send, run_stream_);
  // The receive part is a call of its own, on the same stream, whenever the hook comes.
  const CallOptions later{.stream = call.stream};
  const auto& waiting = queues_[static_cast<std::size_t>(kind)];
  const auto part = waiting->wait_for_hook([this, kind, later, recorded = recording_, launch = std::move(launch)] {
    if (executor_->is_capturing(later.stream) != recorded) {
      fail<InvalidArgument>("{}: its send part was {} into a graph, so its receive part must be, too: call the hook {}",
                            kind == LowLatencyKind::dispatch ? "low_latency_dispatch" : "low_latency_combine",
                            recorded ? "recorded" : "not recorded",
                            recorded ? "before the recording ends" : "before the recording begins");
    }
    begin(later);
    launch(LowLatencyPhase::receive, run_stream_);
    finish(later);
  });
  hook = [queue = std::weak_ptr(waiting), part] {
    const auto alive = queue.lock();  // only the buffer keeps it
    if (!alive) throw UseAfterDestroy("the hook of a low-latency call after the buffer's destroy");
    alive->receive(part);
  };
}

void Buffer::Implementation::low_latency_clean(const CallOptions& call) {
  require_low_latency("low_latency_clean");
  look_after_low_latency();
  begin(call);
  executor_->kernels().barrier_low_latency({.common = low_latency_params()}, LaunchShape{1, 64, 0}, run_stream_);
  finish(call);
}

void Buffer::Implementation::low_latency_update_mask(int rank, bool masked, const CallOptions& call) {
  require_masking("low_latency_update_mask");
  check_range("rank", rank, 0, num_ranks_ - 1);
  begin(call);
  executor_->copy(mask_ + rank, masked ? &low_latency_state_->one : &low_latency_state_->none, sizeof(std::int32_t),
                  run_stream_);
  finish(call);
}

void Buffer::Implementation::low_latency_query_mask(const TensorView& status, const CallOptions& call) {
  require_masking("low_latency_query_mask");
  check_tensor("status", status, executor_->device(), {DType::int32}, {num_ranks_});
  begin(call);
  executor_->copy(status.data, mask_, status.bytes(), run_stream_);
  finish(call);
}

void Buffer::Implementation::low_latency_clear_mask(const CallOptions& call) {
  require_masking("low_latency_clear_mask");
  begin(call);
  executor_->fill(mask_, 0, static_cast<std::size_t>(num_ranks_) * sizeof(std::int32_t), run_stream_);
  finish(call);
}

void Buffer::Implementation::low_latency_resume() {
  require_masking("low_latency_resume");
  executor_->make_current();
  settle();
  look_after_low_latency();
  for (const auto& waiting : queues_) waiting->drop_all();

  // Everybody goes on from the largest count, so that no signal of an earlier call can be taken for a later one's.
  LowLatencyState state;
  executor_->copy(&state, low_latency_state_, sizeof state, comm_stream_);
  executor_->synchronize(comm_stream_);
  std::array<std::uint64_t, 3> counts = {state.barriers.calls, 0, 0};
  for (std::size_t kind = 0; kind < queues_.size(); ++kind) {
    counts[kind + 1] = std::max(state.counters[kind].sent.calls, state.counters[kind].received.calls);
  }
  const std::vector<std::byte> all = bootstrap_->all_gather(std::as_bytes(std::span(counts)));
  for (int rank = 0; rank < num_ranks_; ++rank) {
    std::array<std::uint64_t, 3> theirs;
    std::memcpy(theirs.data(), all.data() + static_cast<std::size_t>(rank) * sizeof theirs, sizeof theirs);
    for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = std::max(counts[i], theirs[i]);
  }
  state.barriers.calls = counts[0];
  for (std::size_t kind = 0; kind < queues_.size(); ++kind) {
    state.counters[kind].sent.calls = state.counters[kind].received.calls = counts[kind + 1];
  }
  executor_->copy(low_latency_state_, &state, sizeof state, comm_stream_);
  executor_->synchronize(comm_stream_);  // `state` is read until then, also where what follows throws
  if (connections_ != nullptr) {
    try {
      resume_rdma(counts);
    } catch (const Error& error) {
      // The old queue pairs are gone, and kernels would write where they were.
      broken_ = fmt::format("low_latency_resume made no new RDMA connections: {}", error.what());
      broken_by_rdma_ = true;
      throw;
    }
  }
  executor_->fill(mask_, 0, static_cast<std::size_t>(num_ranks_) * sizeof(std::int32_t), comm_stream_);
  executor_->synchronize(comm_stream_);
  bootstrap_->barrier();
}

}  // namespace deep_ep
