// Set-up and tear-down of a Buffer, and what all calls share.
#include "csrc/buffer/implementation.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/buffer/low_latency/rails.hpp"
#include "csrc/memory/storage.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "kernels/layout/params.hpp"

namespace deep_ep {
namespace {

/// Keeps the communication stream alive as long as anything that recorded work on it: tensors may outlive the buffer.
struct ExecutorWithStream {
  ExecutorWithStream(std::shared_ptr<Executor> e, StreamHandle of_the_caller)
      : executor(std::move(e)),
        stream(of_the_caller != nullptr ? of_the_caller : executor->create_stream()),
        owned(of_the_caller == nullptr) {}
  ~ExecutorWithStream() {
    if (owned) executor->destroy_stream(stream);
  }
  ExecutorWithStream(const ExecutorWithStream&) = delete;
  std::shared_ptr<Executor> executor;
  StreamHandle stream;
  bool owned;
};

constexpr std::size_t kLargestDefaultWindow = std::size_t{1} << 30;
constexpr int kMostWindowTokens = 8192;
constexpr std::size_t kSmallestRow = 128;

std::size_t default_window(std::size_t heap_bytes) { return std::min(heap_bytes / 4, kLargestDefaultWindow); }

ControlWindow control_window(int num_ranks, const BufferOptions& options, std::size_t window_bytes) {
  ControlWindow control;
  control.num_ranks = num_ranks;
  control.max_local_experts = options.max_local_experts;
  const std::size_t rows = window_bytes / (kSmallestRow * static_cast<std::size_t>(num_ranks));
  control.max_window_tokens = static_cast<int>(std::clamp<std::size_t>(rows, 2, kMostWindowTokens));
  return control;
}

/// The heap's layout follows from these, so they must be equal.
void check_same_options(Bootstrap& bootstrap, const BufferOptions& options) {
  constexpr std::array kNames = {"heap_bytes",        "window_bytes",        "max_local_experts",
                                 "low_latency_bytes", "low_latency_masking", "allow_nvlink_for_low_latency",
                                 "low_latency_rails"};
  const std::array<std::uint64_t, kNames.size()> mine = {options.heap_bytes,
                                                         options.window_bytes,
                                                         static_cast<std::uint64_t>(options.max_local_experts),
                                                         options.low_latency_bytes,
                                                         options.low_latency_masking ? std::uint64_t{1} : 0,
                                                         options.allow_nvlink_for_low_latency ? std::uint64_t{1} : 0,
                                                         static_cast<std::uint64_t>(options.low_latency_rails)};
  const std::vector<std::byte> all = bootstrap.all_gather(std::as_bytes(std::span(mine)));
  for (int rank = 0; rank < bootstrap.size(); ++rank) {
    std::array<std::uint64_t, kNames.size()> theirs;
    std::memcpy(theirs.data(), all.data() + static_cast<std::size_t>(rank) * sizeof theirs, sizeof theirs);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      if (theirs[i] == mine[i]) continue;
      fail<RankMismatch>("Buffer: {} is {} on rank {} but {} on rank {}; it must be equal on all ranks", kNames[i],
                         mine[i], bootstrap.rank(), theirs[i], rank);
    }
  }
}

std::size_t aligned_bytes(const TensorView& view) {
  return (view.bytes() + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
}

std::size_t bytes_together(const std::vector<TensorView>& views) {
  std::size_t bytes = 0;
  for (const TensorView& view : views) bytes += aligned_bytes(view);
  return std::max<std::size_t>(bytes, 1);
}

/// The tensors one after the other.
std::vector<Tensor> lay_out(std::vector<TensorView> views, const std::shared_ptr<StreamStorage>& storage) {
  std::vector<Tensor> tensors;
  std::byte* at = storage->data();
  for (TensorView& view : views) {
    view.data = at;
    at += aligned_bytes(view);
    tensors.emplace_back(view, storage);
  }
  return tensors;
}

}  // namespace

Buffer::Implementation::Implementation(std::shared_ptr<Bootstrap> bootstrap, std::shared_ptr<Executor> executor,
                                       const BufferOptions& options)
    : bootstrap_(std::move(bootstrap)), options_(options) {
  if (!bootstrap_) throw InvalidArgument("bootstrap is null");
  if (!executor) throw InvalidArgument("executor is null");
  rank_ = bootstrap_->rank();
  num_ranks_ = bootstrap_->size();
  if (num_ranks_ < 1 || num_ranks_ > kMaxRanks || rank_ < 0 || rank_ >= num_ranks_) {
    fail<InvalidArgument>("the bootstrap says rank {} of {}, allowed: at most {} ranks", rank_, num_ranks_, kMaxRanks);
  }
  agree(*bootstrap_, "reading the options of a Buffer", [&] {
    timeout_s_ = options_.timeout_s ? *options_.timeout_s : environment::number("DEEP_EP_TIMEOUT_S");
    if (!(timeout_s_ >= 0)) fail<InvalidArgument>("timeout_s is {}, allowed: 0 (for ever) or more", timeout_s_);
    if (options_.low_latency_bytes != 0) options_.low_latency_rails = asked_for_rails(options_.low_latency_rails);
  });
  check_same_options(*bootstrap_, options_);
  if (options_.max_local_experts < 1 || options_.max_local_experts > 1 << 16) {
    fail<InvalidArgument>("max_local_experts is {}, allowed: 1 to 65536", options_.max_local_experts);
  }

  constexpr std::size_t kLeastShared = std::size_t{16} << 10;
  if (executor->policy().max_shared_bytes < kLeastShared) {
    fail<InvalidArgument>("the executor gives a block {} of shared memory, at least {} are needed",
                          format_bytes(executor->policy().max_shared_bytes), format_bytes(kLeastShared));
  }

  executor->make_current();
  const auto with_stream = std::make_shared<ExecutorWithStream>(std::move(executor), options_.comm_stream);
  executor_ = std::shared_ptr<Executor>(with_stream, with_stream->executor.get());
  comm_stream_ = with_stream->stream;
  home_ = std::make_shared<HomeStream>(executor_, comm_stream_);
  cache_ = std::make_shared<MemoryCache>(home_);

  lay_out_heap();
  state_ = static_cast<KernelState*>(own(executor_->allocate(sizeof(KernelState)), &Executor::free));
  executor_->fill(state_, 0, sizeof(KernelState), comm_stream_);
  const auto counters =
      static_cast<std::size_t>(num_ranks_) * (1 + static_cast<std::size_t>(options_.max_local_experts));
  const std::size_t work_bytes = sizeof(LayoutWork) + sizeof(std::int32_t) * counters;
  layout_work_ = static_cast<LayoutWork*>(own(executor_->allocate(work_bytes), &Executor::free));
  executor_->fill(layout_work_, 0, work_bytes, comm_stream_);
  executor_->synchronize(comm_stream_);
  faults_ = static_cast<FaultRecord*>(own(executor_->allocate_pinned(2 * sizeof(FaultRecord)), &Executor::free_pinned));
  const std::size_t counts_bytes =
      sizeof(HostCounts) + sizeof(std::int32_t) * static_cast<std::size_t>(options_.max_local_experts);
  host_counts_ = static_cast<HostCounts*>(own(executor_->allocate_pinned(counts_bytes), &Executor::free_pinned));
  if (options_.low_latency_bytes != 0) set_up_low_latency();
  bootstrap_->barrier();  // nobody signals before everybody is ready
  log::info("buffer: rank {} of {} on {}, heap {}, of which window {}", rank_, num_ranks_,
            to_string(executor_->device()), format_bytes(heap_->bytes()), format_bytes(window_bytes_));
}

void Buffer::Implementation::lay_out_heap() {
  window_bytes_ = options_.window_bytes != 0 ? options_.window_bytes : default_window(options_.heap_bytes);
  control_ = control_window(num_ranks_, options_, window_bytes_);
  const std::size_t least = control_.bytes() + window_bytes_;
  if (options_.heap_bytes < window_bytes_ || options_.heap_bytes - window_bytes_ < control_.bytes()) {
    fail<OutOfMemory>("heap_bytes is {}, but the signals of {} ranks take {} and the window {}: at least {} are needed",
                      options_.heap_bytes, num_ranks_, format_bytes(control_.bytes()), format_bytes(window_bytes_),
                      least);
  }
  low_latency_window_ =
      LowLatencyWindow::make(control_.bytes(), options_.low_latency_bytes, num_ranks_, options_.max_local_experts);
  make_heap(0);
  nodes_ = find_nodes(*bootstrap_, heap_->peers(), options_.ranks_per_node);
  const std::size_t low_latency_end = control_.bytes() + low_latency_window_.bytes;
  if (options_.low_latency_bytes != 0) far_ranks_ = nodes_.reached_by_rdma(options_.allow_nvlink_for_low_latency);
  if (!far_ranks_.empty()) {
    // Only now is it known that there must be room for what NICs fetch.
    rail_width_ = why_not_by_rails() == nullptr ? nodes_.ranks_of_each_node() : 0;
    staging_ = LowLatencyStaging::make(low_latency_end, low_latency_window_, rail_width_ == 0 ? 0 : nodes_.num_nodes);
    make_heap(staging_.bytes);
  }
  const std::size_t window_at = low_latency_end + staging_.bytes;
  window_ = heap_->local() + window_at;
  window_bytes_ = window_bytes_ / kLine * kLine;
  const std::size_t arena_at = window_at + window_bytes_;
  arena_ = std::make_shared<Arena>(executor_, heap_, arena_at, heap_->bytes() - arena_at);
}

void Buffer::Implementation::make_heap(std::size_t more) {
  if (heap_ != nullptr) {
    heap_->unmap_peers();
    bootstrap_->barrier();  // nobody maps a peer any more
    heap_.reset();
  }
  HeapOptions heap_options;
  heap_options.bytes = options_.heap_bytes + options_.low_latency_bytes + more;
  heap_options.timeout_s = timeout_s_;
  heap_ = executor_->create_heap(*bootstrap_, heap_options);
}

Buffer::Implementation::~Implementation() {
  try {
    executor_->make_current();
    home_->works_on(comm_stream_);
    settle();
  } catch (const std::exception& error) {
    log::warn("buffer: rank {} is destroyed after a failure: {}", rank_, error.what());
  }
  drain_rdma();
  connections_.reset();
  if (heap_) heap_->unmap_peers();
}

void* Buffer::Implementation::own(void* memory, void (Executor::*free)(void*) noexcept) {
  owned_.emplace_back(memory, [executor = executor_, free](void* owned) { (executor.get()->*free)(owned); });
  return memory;
}

void Buffer::Implementation::destroy_collectively() {
  executor_->make_current();
  try {
    settle();
  } catch (const Error& error) {
    log::warn("buffer: rank {} is destroyed after a failure: {}", rank_, error.what());
  }
  // After a fault that breaks the buffer somebody may never come. Any other may be known to this rank alone, and the
  // peers would wait for it.
  if (!broken_.empty() || (met_fault() && breaks(faults_[0]))) return;
  drain_rdma();
  bootstrap_->barrier();  // nobody writes to a peer any more
  connections_.reset();
  heap_->unmap_peers();
  bootstrap_->barrier();  // nobody maps a peer any more
}

IntranodeParams Buffer::Implementation::intranode_params() const {
  IntranodeParams params;
  params.rank = rank_;
  params.num_ranks = num_ranks_;
  params.heaps = heap_->device_peers();
  params.control = control_;
  params.state = state_;
  return params;
}

WaitContext Buffer::Implementation::wait_context() const {
  return WaitContext{faults_, &state_->abort, static_cast<std::uint64_t>(std::min(timeout_s_, 1e9) * 1e9)};
}

void Buffer::Implementation::begin(const CallOptions& call) {
  executor_->make_current();
  // A call that the caller's stream waits for anyway runs there: going to another stream and back costs microseconds.
  // In a recording it costs nothing, and the communication stream is what orders the calls of a graph.
  const bool in_place = !call.async_finish && !call.previous_event && !executor_->is_capturing(call.stream);
  run_stream_ = in_place ? call.stream : comm_stream_;
  if (call.previous_event) {
    executor_->wait_event(run_stream_, call.previous_event);
  } else if (call.stream != run_stream_) {
    executor_->wait_event(run_stream_, executor_->record_event(call.stream));
  }
  // After the wait: that is what makes the stream a part of the recording.
  recording_ = !in_place && executor_->is_capturing(run_stream_);
  if (!recording_) {
    if (latest_call_) executor_->wait_event(run_stream_, latest_call_);
    home_->work_begins();
  }
  home_->works_on(run_stream_);
}

EventHandle Buffer::Implementation::finish(const CallOptions& call) {
  EventHandle done = executor_->record_event(run_stream_);
  if (!recording_) {
    latest_call_ = done;
    home_->work_ends(done);
  }
  home_->works_on(comm_stream_);
  if (call.async_finish) return done;
  if (call.stream != run_stream_) executor_->wait_event(call.stream, done);
  return {};
}

void Buffer::Implementation::abandon_call() {
  if (!recording_) latest_call_ = executor_->record_event(run_stream_);
  home_->works_on(comm_stream_);
}

void Buffer::Implementation::settle() {
  if (latest_call_) executor_->wait_event(comm_stream_, latest_call_);
  executor_->synchronize(comm_stream_);
}

void Buffer::Implementation::use_on(const CallOptions& call, const Tensor& tensor) const {
  // All our tensors have such a storage; a caller may have put together a handle with others.
  if (auto* ours = dynamic_cast<StreamStorage*>(tensor.storage().get())) {
    ours->record_stream(call.stream, recording_);
  } else {
    tensor.record_stream(call.stream);
  }
}

bool Buffer::Implementation::in_heap(const TensorView& tensor) const {
  // Signals and window do not count: peers write there.
  return tensor.device == executor_->device() &&
         heap_->contains(tensor.data, std::max<std::size_t>(1, tensor.bytes())) &&
         static_cast<const std::byte*>(tensor.data) >= window_ + window_bytes_;
}

TensorView Buffer::Implementation::local_memory() const {
  const auto bytes = static_cast<std::int64_t>(heap_->bytes() - heap_->offset_of(window_));
  return TensorView::contiguous(window_, DType::uint8, {bytes}, executor_->device());
}

std::optional<std::vector<Tensor>> Buffer::Implementation::try_heap_tensors(std::vector<TensorView> wanted) {
  auto storage = ArenaStorage::allocate(arena_, bytes_together(wanted), home_, recording_);
  if (!storage) return std::nullopt;
  return lay_out(std::move(wanted), std::move(storage));
}

std::vector<Tensor> Buffer::Implementation::pool_tensors(std::vector<TensorView> wanted) {
  auto storage = std::make_shared<PoolStorage>(cache_, bytes_together(wanted), recording_);
  return lay_out(std::move(wanted), std::move(storage));
}

Tensor Buffer::Implementation::pool_tensor(DType dtype, std::initializer_list<std::int64_t> shape) {
  return pool_tensors({unplaced(dtype, shape)}).front();
}

Tensor Buffer::Implementation::allocate_tensor(DType dtype, std::initializer_list<std::int64_t> shape,
                                               const CallOptions& call) {
  raise_faults();
  executor_->make_current();
  recording_ = executor_->is_capturing(call.stream) || executor_->is_capturing(comm_stream_);
  if (!recording_) {
    if (latest_call_) executor_->wait_event(comm_stream_, latest_call_);
    home_->work_begins();
  }
  const auto made = try_heap_tensors({unplaced(dtype, shape)});
  if (!recording_) {
    // The memory is free in the order of the communication stream; the caller uses it on its own. A graph got memory
    // that nobody uses.
    EventHandle is_free = executor_->record_event(comm_stream_);
    latest_call_ = is_free;
    home_->work_ends(is_free);
    if (call.stream != comm_stream_) executor_->wait_event(call.stream, is_free);
  }
  if (!made) {
    fail<OutOfMemory>("{} does not fit the heap of {}: raise heap_bytes or drop received tensors earlier",
                      unplaced(dtype, shape).describe(), format_bytes(options_.heap_bytes));
  }
  use_on(call, made->front());
  return made->front();
}

void Buffer::Implementation::require_one_node(const char* call) const {
  if (nodes_.num_nodes == 1) return;
  const std::vector<int> far = nodes_.reached_by_rdma(true);
  fail<InvalidArgument>(
      "Buffer::{} is for ranks of one node, but there are {} nodes, and rank {} is on another one than rank {}: "
      "between "
      "nodes there are the low-latency calls",
      call, nodes_.num_nodes, far.front(), rank_);
}

void Buffer::Implementation::check() {
  executor_->make_current();
  settle();
  raise_faults();
  if (connections_ != nullptr && mask_ == nullptr) connections_->check();
}

}  // namespace deep_ep
