// The public class: refuses use after destroy and in forked children, and hands each call to the mode that makes it.
#include "deep_ep/buffer.hpp"

#include <algorithm>
#include <exception>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/buffer/dispatch_layout.hpp"
#include "csrc/buffer/elastic/elastic.hpp"
#include "csrc/buffer/internode/internode.hpp"
#include "csrc/buffer/intranode/intranode.hpp"
#include "csrc/buffer/low_latency/low_latency.hpp"
#include "csrc/buffer/runtime.hpp"
#include "csrc/memory/heap_choice.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/home_process.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/interrupt.hpp"

namespace deep_ep {

/// The parts of a Buffer: the runtime that its modes share, and the modes.
class Buffer::Implementation {
 public:
  /// Collective.
  Implementation(const std::shared_ptr<Bootstrap>& bootstrap, std::shared_ptr<Executor> executor,
                 const BufferOptions& options);
  ~Implementation() {
    settle_last_work();
    drain();
  }
  Implementation(const Implementation&) = delete;
  Implementation& operator=(const Implementation&) = delete;

  /// UseAfterDestroy, or Error in a child forked after the buffer was made.
  static Implementation& alive(const std::unique_ptr<Implementation>& buffer, const char* call);
  /// A forked child has none of the threads that the end of a buffer waits for, and the memory is its parent's.
  static void leave_to_the_parent(std::unique_ptr<Implementation>& buffer) {
    if (buffer && buffer->home.left()) static_cast<void>(buffer.release());
  }
  /// For a call, which lasts as long as this does: no other thread may make one meanwhile.
  class Call;

  std::string describe() const;
  void check(bool wait);
  void destroy_collectively();

  const HomeProcess home;
  Runtime runtime;
  std::optional<DispatchLayouts> layouts;
  std::optional<Intranode> intranode;
  std::optional<Internode> internode;
  std::optional<LowLatency> low_latency;

 private:
  std::string describe_normal_mode() const;
  std::string describe_heap() const;
  /// For a rank that waits in vain: what has become of all that was posted to NICs. Empty where there is none.
  std::string describe_health() const;
  /// What this rank has posted has reached its peers.
  void drain() noexcept;
  void end_with_masks();
  /// The host waits for this rank's work, which may have failed.
  void settle_last_work() noexcept;
};

class Buffer::Implementation::Call {
 public:
  Call(const std::unique_ptr<Implementation>& buffer, const char* call)
      : buffer_(alive(buffer, call)), call_(call), use_(buffer_.runtime.one_thread(), call) {}

  Implementation* operator->() const { return &buffer_; }
  bool outermost() const { return use_.outermost(); }
  /// Among ranks of one node? If not, there are calls between nodes, or InvalidArgument.
  bool inside_one_node() const {
    const NodeMembership& nodes = buffer_.runtime.nodes();
    if (nodes.num_nodes == 1 || buffer_.internode) return nodes.num_nodes == 1;
    fail<InvalidArgument>(
        "Buffer::{} needs nodes of equally many consecutive ranks, but the {} ranks are of {} nodes that are not",
        call_, buffer_.runtime.num_ranks(), nodes.num_nodes);
  }
  /// A dispatch as a part of another call.
  SendRows dispatch() const {
    return [this, inside = inside_one_node()](const DispatchArguments& sent, CallScope& scope) {
      return inside ? buffer_.intranode->dispatch(sent, scope) : buffer_.internode->dispatch(sent, scope);
    };
  }
  /// Of calls that each node makes by itself; there are equally many ranks in each.
  Intranode& each_node() const {
    static_cast<void>(inside_one_node());
    return *buffer_.intranode;
  }
  LowLatency& low_latency() const {
    if (buffer_.low_latency) return *buffer_.low_latency;
    fail<InvalidArgument>(
        "{} needs low-latency memory, but the buffer's low_latency.bytes is 0: see Buffer::low_latency_bytes_hint",
        call_);
  }
  LowLatency& masking() const { return low_latency().masking(call_); }

 private:
  Implementation& buffer_;
  const char* call_;
  OneThread::Use use_;
};

Buffer::Implementation::Implementation(const std::shared_ptr<Bootstrap>& bootstrap, std::shared_ptr<Executor> executor,
                                       const BufferOptions& options)
    : runtime(bootstrap, std::move(executor), options) {
  agree(runtime.bootstrap(), "allocating memory for the calls of a Buffer", [&] {
    layouts.emplace(runtime);
    intranode.emplace(runtime);
  });
  if (runtime.layout().internode.bytes != 0) internode.emplace(runtime);
  if (runtime.options().low_latency.bytes != 0) low_latency.emplace(runtime);
  runtime.faults().explain_timeouts_by([this] { return describe_health(); });
  runtime.bootstrap().barrier();  // no rank signals before all ranks are ready
  log::info("buffer: rank {} of {} on {}, heap {}, of which window {}", runtime.rank(), runtime.num_ranks(),
            to_string(runtime.device()), format_bytes(runtime.heap()->bytes()),
            format_bytes(runtime.layout().window_bytes));
}

Buffer::Implementation& Buffer::Implementation::alive(const std::unique_ptr<Implementation>& buffer, const char* call) {
  if (!buffer) fail<UseAfterDestroy>("Buffer::{} after destroy", call);
  if (buffer->home.left()) {
    fail<Error>("Buffer::{} in a child forked after the buffer was made: only the process that made it can use it",
                call);
  }
  return *buffer;
}

std::string Buffer::Implementation::describe_heap() const {
  const HeapLayout& layout = runtime.layout();
  const SymmetricHeap& heap = *runtime.heap();
  std::string text = fmt::format("heap of {}", format_bytes(heap.bytes()));
  if (runtime.device().kind == Device::Kind::cuda) text += fmt::format(", shared by {}", name_of(heap.kind()));
  text += fmt::format(": signals {}", format_bytes(layout.control.bytes()));
  if (layout.low_latency.bytes != 0) text += fmt::format(", low latency {}", format_bytes(layout.low_latency.bytes));
  if (layout.staging.bytes != 0) text += fmt::format(", for NICs to read {}", format_bytes(layout.staging.bytes));
  return text + fmt::format(", window {}, received tensors {}", format_bytes(layout.window_bytes),
                            format_bytes(heap.bytes() - layout.arena_at()));
}

std::string Buffer::Implementation::describe_normal_mode() const {
  const int num_nodes = runtime.nodes().num_nodes;
  if (num_nodes != 1 && !internode) {
    return "normal mode: not between nodes that are not all of equally many consecutive ranks";
  }
  const int multiprocessors = runtime.policy().multiprocessors;
  const auto sms = [&](const Config& config) { return std::min(config.num_sms, multiprocessors); };
  const std::string text =
      fmt::format("normal mode: dispatch on {} SMs, combine on {}, of {}, where a call does not say",
                  sms(Config::dispatch_default(runtime.num_ranks())), sms(Config::combine_default(runtime.num_ranks())),
                  multiprocessors);
  if (num_nodes != 1) {
    return text + fmt::format(", between nodes (combine pulls, or pulls a copy) by {}", internode->describe());
  }
  const int lanes = runtime.options().internode.lanes;
  return lanes == 1 ? text : text + fmt::format(", without the {} lanes, as there is one node", lanes);
}

std::string Buffer::Implementation::describe() const {
  const NodeMembership& nodes = runtime.nodes();
  std::vector<int> of_node;
  for (int rank = 0; rank < runtime.num_ranks(); ++rank) {
    if (nodes.same_node(rank)) of_node.push_back(rank);
  }
  const double timeout_s = runtime.timeout_s();
  return fmt::format("rank {} of {} on {}, node {} of {}: {}\n{}\n{}\n{}\ntime-out: {}\n", runtime.rank(),
                     runtime.num_ranks(), to_string(runtime.device()),
                     nodes.node[static_cast<std::size_t>(runtime.rank())], nodes.num_nodes, format_ranks(of_node),
                     describe_heap(), describe_normal_mode(),
                     low_latency ? low_latency->describe() : "low latency: no memory",
                     timeout_s == 0 ? "none" : fmt::format("{} s", timeout_s));
}

std::string Buffer::Implementation::describe_health() const {
  const std::string normal = internode ? internode->health() : std::string();
  std::string of_low_latency = low_latency ? low_latency->health() : std::string();
  if (normal.empty() || normal == of_low_latency) return of_low_latency;
  return of_low_latency.empty() ? normal : fmt::format("{}. Low-latency calls: {}", normal, of_low_latency);
}

void Buffer::Implementation::drain() noexcept {
  if (internode) internode->drain();
  if (low_latency) low_latency->drain();
}

void Buffer::Implementation::check(bool wait) {
  runtime.executor()->make_current();
  try {
    if (wait) runtime.calls().settle();
  } catch (const Interrupted&) {
    runtime.faults().break_by_interruption();
  }
  runtime.faults().raise();
  if (internode) internode->check();
  if (low_latency) low_latency->check();
}

void Buffer::Implementation::settle_last_work() noexcept {
  try {
    runtime.executor()->make_current();
    runtime.calls().settle();
  } catch (const std::exception& error) {
    log::warn("buffer: rank {} is destroyed after a failure: {}", runtime.rank(), error.what());
  }
}

void Buffer::Implementation::destroy_collectively() {
  settle_last_work();
  // After a fault that breaks the buffer, a rank may never come. Any other fault may be known to this rank alone, and
  // its peers would wait for it. The others go on without a rank that they have masked. It does not wait for them; nor
  // they for it.
  if (runtime.faults().broken() || runtime.faults().given_up()) return;
  if (runtime.options().low_latency.masking) return end_with_masks();
  drain();
  runtime.bootstrap().begin(Purpose::destroying);
  try {
    runtime.bootstrap().barrier();  // nobody writes to a peer any more
    internode.reset();
    if (low_latency) low_latency->disconnect();
    runtime.unmap_peers_together();
  } catch (const PeerLeft& left) {
    // The buffer is broken for another rank alone, and that rank has gone on: this one does not wait for it, either.
    log::info("buffer: rank {} is destroyed alone: {}", runtime.rank(), left.what());
  }
}

void Buffer::Implementation::end_with_masks() {
  // What this rank has posted has arrived before the others hear that it is here, and free their memory.
  drain();
  // Those that are lost never come, so ranks meet in the control plane: it knows who is. Then each ends alone.
  const double most_s = 2 * runtime.timeout_s();
  runtime.membership()->meet(most_s);
  low_latency->log_masks();
}

Buffer::Buffer(std::shared_ptr<Bootstrap> bootstrap, std::shared_ptr<Executor> executor, const BufferOptions& options)
    : implementation_(std::make_unique<Implementation>(bootstrap, std::move(executor), options)) {}
Buffer::~Buffer() { Implementation::leave_to_the_parent(implementation_); }
Buffer::Buffer(Buffer&&) noexcept = default;
Buffer& Buffer::operator=(Buffer&& other) noexcept {
  Implementation::leave_to_the_parent(implementation_);
  implementation_ = std::move(other.implementation_);
  return *this;
}

int Buffer::rank() const { return Implementation::alive(implementation_, "rank").runtime.rank(); }
int Buffer::num_ranks() const { return Implementation::alive(implementation_, "num_ranks").runtime.num_ranks(); }
int Buffer::num_nodes() const { return Implementation::alive(implementation_, "num_nodes").runtime.nodes().num_nodes; }
Executor& Buffer::executor() const { return *Implementation::alive(implementation_, "executor").runtime.executor(); }
StreamHandle Buffer::comm_stream() const {
  return Implementation::alive(implementation_, "comm_stream").runtime.comm_stream();
}
const BufferOptions& Buffer::options() const {
  return Implementation::alive(implementation_, "options").runtime.options();
}
std::string Buffer::describe() const { return Implementation::alive(implementation_, "describe").describe(); }
std::vector<int> Buffer::lost_ranks() const {
  const control::Membership* membership = Implementation::alive(implementation_, "lost_ranks").runtime.membership();
  std::set<int> lost;
  if (membership != nullptr) {
    for (const control::LostRank& verdict : membership->lost()) lost.insert(verdict.rank);
  }
  return {lost.begin(), lost.end()};
}

DispatchLayout Buffer::get_dispatch_layout(const ConstTensorView& topk_idx, int num_experts, const CallOptions& call) {
  return Implementation::Call(implementation_, "get_dispatch_layout")->layouts->count(topk_idx, num_experts, call);
}
DispatchResult Buffer::dispatch(const DispatchArguments& arguments, const CallOptions& call) {
  const Implementation::Call in(implementation_, "dispatch");
  return in.inside_one_node() ? in->intranode->dispatch(arguments, call) : in->internode->dispatch(arguments, call);
}
CachedDispatchResult Buffer::cached_dispatch(const CachedDispatchArguments& arguments, const CallOptions& call) {
  const Implementation::Call in(implementation_, "cached_dispatch");
  return in.inside_one_node() ? in->intranode->dispatch(arguments, call) : in->internode->dispatch(arguments, call);
}
CombineResult Buffer::combine(const CombineArguments& arguments, const CallOptions& call) {
  const Implementation::Call in(implementation_, "combine");
  return in.inside_one_node() ? in->intranode->combine(arguments, call) : in->internode->combine(arguments, call);
}

ElasticDispatchResult Buffer::dispatch_elastic(const ElasticDispatchArguments& arguments, const CallOptions& call) {
  const Implementation::Call in(implementation_, "dispatch_elastic");
  return in.inside_one_node() ? in->intranode->dispatch_elastic(arguments, call)
                              : in->internode->dispatch_elastic(arguments, *in->layouts, call);
}
ElasticCachedDispatchResult Buffer::dispatch_elastic(const ElasticCachedDispatchArguments& arguments,
                                                     const CallOptions& call) {
  const Implementation::Call in(implementation_, "dispatch_elastic");
  return in.inside_one_node() ? in->intranode->dispatch_elastic(arguments, call)
                              : in->internode->dispatch_elastic(arguments, call);
}
CombineResult Buffer::combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call) {
  const Implementation::Call in(implementation_, "combine_elastic");
  if (in.inside_one_node()) return in->intranode->combine_elastic(arguments, call);
  return combine_by_dispatch(arguments, in->runtime, in.dispatch(), call);
}
ElasticReturn Buffer::begin_combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call) {
  const Implementation::Call in(implementation_, "begin_combine_elastic");
  return begin_combine(arguments, in->runtime, in.dispatch(), call);
}
CombineResult Buffer::end_combine_elastic(const ElasticReturn& back, const ElasticCombineArguments& arguments,
                                          const CallOptions& call) {
  return end_combine(back, arguments, Implementation::Call(implementation_, "end_combine_elastic")->runtime, call);
}
EventHandle Buffer::barrier(const CallOptions& call) {
  const Implementation::Call in(implementation_, "barrier");
  return in.inside_one_node() ? in->intranode->barrier(call) : in->internode->barrier(call);
}
EventHandle Buffer::prefetch_weights(const WeightPrefetch& weights, const CallOptions& call) {
  return Implementation::Call(implementation_, "prefetch_weights").each_node().prefetch_weights(weights, call);
}
EventHandle Buffer::reduce_grads(const GradReduction& grads, const CallOptions& call) {
  return Implementation::Call(implementation_, "reduce_grads").each_node().reduce_grads(grads, call);
}

LowLatencyDispatchResult Buffer::low_latency_dispatch(const LowLatencyDispatchArguments& arguments,
                                                      const CallOptions& call) {
  return Implementation::Call(implementation_, "low_latency_dispatch").low_latency().dispatch(arguments, call);
}
LowLatencyCombineResult Buffer::low_latency_combine(const LowLatencyCombineArguments& arguments,
                                                    const CallOptions& call) {
  return Implementation::Call(implementation_, "low_latency_combine").low_latency().combine(arguments, call);
}
TensorView Buffer::low_latency_combine_buffer(const LowLatencyHandle& handle) {
  return Implementation::Call(implementation_, "low_latency_combine_buffer").low_latency().combine_buffer(handle);
}
void Buffer::low_latency_clean(StreamHandle stream) {
  Implementation::Call(implementation_, "low_latency_clean").low_latency().clean(stream);
}
LowLatencyStats Buffer::low_latency_stats(LowLatencyStatsThen then, StreamHandle stream) {
  return Implementation::Call(implementation_, "low_latency_stats").low_latency().stats(then, stream);
}
void Buffer::low_latency_update_mask(int rank, bool masked, StreamHandle stream) {
  Implementation::Call(implementation_, "low_latency_update_mask").masking().update_mask(rank, masked, stream);
}
void Buffer::low_latency_query_mask(const TensorView& status, StreamHandle stream) {
  Implementation::Call(implementation_, "low_latency_query_mask").masking().query_mask(status, stream);
}
void Buffer::low_latency_clear_mask(StreamHandle stream) {
  Implementation::Call(implementation_, "low_latency_clear_mask").masking().clear_mask(stream);
}
void Buffer::low_latency_resume() {
  Implementation::Call(implementation_, "low_latency_resume").low_latency().resume();
}
TensorView Buffer::low_latency_memory() const {
  return Implementation::Call(implementation_, "low_latency_memory").low_latency().memory();
}

Tensor Buffer::allocate_tensor(DType dtype, std::initializer_list<std::int64_t> shape, StreamHandle stream) {
  const Implementation::Call in(implementation_, "allocate_tensor");
  Runtime& runtime = in->runtime;
  runtime.faults().raise();
  const TensorView wanted = unplaced(runtime.device(), dtype, shape);
  // There is no event here, so the caller's stream waits until the memory is free.
  CallScope scope(runtime.calls(), {.stream = stream});
  const auto made = scope.try_heap_tensors({&wanted, 1});
  if (!made) {
    fail<OutOfMemory>("{} does not fit the heap of {}: raise heap_bytes or drop received tensors earlier",
                      wanted.describe(), format_bytes(runtime.options().heap_bytes));
  }
  scope.hand_out(made->front());
  scope.finish();
  return made->front();
}
bool Buffer::in_heap(const ConstTensorView& tensor) const {
  return Implementation::alive(implementation_, "in_heap").runtime.in_heap(tensor);
}
TensorView Buffer::local_memory() const {
  const Runtime& runtime = Implementation::alive(implementation_, "local_memory").runtime;
  const auto bytes = static_cast<std::int64_t>(runtime.heap()->bytes() - runtime.layout().window_at());
  return TensorView::contiguous(runtime.window(), DType::uint8, {bytes}, runtime.device());
}

std::size_t Buffer::trim() {
  const Implementation::Call in(implementation_, "trim");
  Backend& executor = *in->runtime.executor();
  executor.make_current();
  if (executor.is_capturing(in->runtime.comm_stream())) {
    throw InvalidArgument("trim: calls are being recorded into a CUDA graph, and the host waits for calls");
  }
  return in->runtime.calls().trim();
}

void Buffer::check(bool wait) { Implementation::Call(implementation_, "check")->check(wait); }

void Buffer::destroy() {
  std::unique_ptr<Implementation> ending;  // outlives the call
  const Implementation::Call call(implementation_, "destroy");
  if (!call.outermost()) {
    fail<Error>("Buffer::destroy within another call of the buffer, allowed: after it has returned");
  }
  ending = std::move(implementation_);  // it is gone however the exchange with the others ends
  ending->destroy_collectively();
}
bool Buffer::destroyed() const { return implementation_ == nullptr; }

}  // namespace deep_ep
