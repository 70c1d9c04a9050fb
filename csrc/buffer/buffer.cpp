// The public class: refuses use after destroy and in forked children, and passes on.
#include "deep_ep/buffer.hpp"

#include <utility>

#include "csrc/buffer/implementation.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep {
namespace {

template <class Implementation>
Implementation& alive(const std::unique_ptr<Implementation>& implementation, const char* call) {
  if (!implementation) fail<UseAfterDestroy>("Buffer::{} after destroy", call);
  if (implementation->inherited()) {
    fail<Error>("Buffer::{} in a child forked after the buffer was made: only the process that made it can use it",
                call);
  }
  return *implementation;
}

/// For a call, which lasts as long as this does: no other thread may make one meanwhile.
template <class Implementation>
class InCall {
 public:
  InCall(const std::unique_ptr<Implementation>& implementation, const char* call)
      : implementation_(alive(implementation, call)), call_(call), use_(implementation_.runtime().one_thread(), call) {}

  Implementation* operator->() const { return &implementation_; }
  LowLatency& low_latency() const { return implementation_.low_latency(call_); }
  bool outermost() const { return use_.outermost(); }
  RankMasks& masks() const { return low_latency().masks(call_); }

 private:
  Implementation& implementation_;
  const char* call_;
  OneThread::Use use_;
};

/// A forked child has none of the threads that the end of a buffer waits for, and the memory is its parent's.
template <class Implementation>
void leave_to_the_parent(std::unique_ptr<Implementation>& implementation) {
  if (implementation && implementation->inherited()) static_cast<void>(implementation.release());
}

}  // namespace

Buffer::Buffer(std::shared_ptr<Bootstrap> bootstrap, std::shared_ptr<Executor> executor, const BufferOptions& options)
    : implementation_(std::make_unique<Implementation>(bootstrap, std::move(executor), options)) {}
Buffer::~Buffer() { leave_to_the_parent(implementation_); }
Buffer::Buffer(Buffer&&) noexcept = default;
Buffer& Buffer::operator=(Buffer&& other) noexcept {
  leave_to_the_parent(implementation_);
  implementation_ = std::move(other.implementation_);
  return *this;
}

int Buffer::rank() const { return alive(implementation_, "rank").runtime().rank(); }
int Buffer::num_ranks() const { return alive(implementation_, "num_ranks").runtime().num_ranks(); }
int Buffer::num_nodes() const { return alive(implementation_, "num_nodes").runtime().nodes().num_nodes; }
Executor& Buffer::executor() const { return *alive(implementation_, "executor").runtime().executor(); }
StreamHandle Buffer::comm_stream() const { return alive(implementation_, "comm_stream").runtime().comm_stream(); }
const BufferOptions& Buffer::options() const { return alive(implementation_, "options").runtime().options(); }
std::string Buffer::describe() const { return alive(implementation_, "describe").describe(); }

DispatchLayout Buffer::get_dispatch_layout(const ConstTensorView& topk_idx, int num_experts, const CallOptions& call) {
  return InCall(implementation_, "get_dispatch_layout")->layouts().count(topk_idx, num_experts, call);
}
DispatchResult Buffer::dispatch(const DispatchArguments& arguments, const CallOptions& call) {
  return InCall(implementation_, "dispatch")->dispatch(arguments, call);
}
CachedDispatchResult Buffer::cached_dispatch(const CachedDispatchArguments& arguments, const CallOptions& call) {
  return InCall(implementation_, "cached_dispatch")->cached_dispatch(arguments, call);
}
CombineResult Buffer::combine(const CombineArguments& arguments, const CallOptions& call) {
  return InCall(implementation_, "combine")->combine(arguments, call);
}

ElasticDispatchResult Buffer::dispatch_elastic(const ElasticDispatchArguments& arguments, const CallOptions& call) {
  return InCall(implementation_, "dispatch_elastic")->dispatch_elastic(arguments, call);
}
ElasticCachedDispatchResult Buffer::dispatch_elastic(const ElasticCachedDispatchArguments& arguments,
                                                     const CallOptions& call) {
  return InCall(implementation_, "dispatch_elastic")->dispatch_elastic(arguments, call);
}
CombineResult Buffer::combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call) {
  return InCall(implementation_, "combine_elastic")->combine_elastic(arguments, call);
}
void Buffer::spread_rows(const RowSpreading& rows, const CallOptions& call) {
  InCall(implementation_, "spread_rows")->runtime().spread_rows(rows, call);
}
EventHandle Buffer::barrier(const CallOptions& call) { return InCall(implementation_, "barrier")->barrier(call); }
EventHandle Buffer::prefetch_weights(const WeightPrefetch& weights, const CallOptions& call) {
  return InCall(implementation_, "prefetch_weights")->prefetch_weights(weights, call);
}
EventHandle Buffer::reduce_grads(const GradReduction& grads, const CallOptions& call) {
  return InCall(implementation_, "reduce_grads")->reduce_grads(grads, call);
}

LowLatencyDispatchResult Buffer::low_latency_dispatch(const LowLatencyDispatchArguments& arguments,
                                                      const CallOptions& call) {
  return InCall(implementation_, "low_latency_dispatch").low_latency().dispatch(arguments, call);
}
LowLatencyCombineResult Buffer::low_latency_combine(const LowLatencyCombineArguments& arguments,
                                                    const CallOptions& call) {
  return InCall(implementation_, "low_latency_combine").low_latency().combine(arguments, call);
}
TensorView Buffer::low_latency_combine_buffer(const LowLatencyHandle& handle) {
  return InCall(implementation_, "low_latency_combine_buffer").low_latency().combine_buffer(handle);
}
void Buffer::low_latency_clean(StreamHandle stream) {
  InCall(implementation_, "low_latency_clean").low_latency().clean(stream);
}
LowLatencyStats Buffer::low_latency_stats(LowLatencyStatsThen then, StreamHandle stream) {
  return InCall(implementation_, "low_latency_stats").low_latency().stats(then, stream);
}
void Buffer::low_latency_update_mask(int rank, bool masked, StreamHandle stream) {
  InCall(implementation_, "low_latency_update_mask").masks().update(rank, masked, stream);
}
void Buffer::low_latency_query_mask(const TensorView& status, StreamHandle stream) {
  InCall(implementation_, "low_latency_query_mask").masks().query(status, stream);
}
void Buffer::low_latency_clear_mask(StreamHandle stream) {
  InCall(implementation_, "low_latency_clear_mask").masks().clear(stream);
}
void Buffer::low_latency_resume() { InCall(implementation_, "low_latency_resume").low_latency().resume(); }

Tensor Buffer::allocate_tensor(DType dtype, std::initializer_list<std::int64_t> shape, StreamHandle stream) {
  return InCall(implementation_, "allocate_tensor")->runtime().allocate_tensor(dtype, shape, stream);
}
bool Buffer::in_heap(const ConstTensorView& tensor) const {
  return alive(implementation_, "in_heap").runtime().in_heap(tensor);
}

TensorView Buffer::local_memory() const { return alive(implementation_, "local_memory").runtime().local_memory(); }
TensorView Buffer::low_latency_memory() const {
  return InCall(implementation_, "low_latency_memory").low_latency().memory();
}

std::size_t Buffer::trim() { return InCall(implementation_, "trim")->runtime().trim(); }

void Buffer::check(bool wait) { InCall(implementation_, "check")->check(wait); }

void Buffer::destroy() {
  std::unique_ptr<Implementation> ending;  // outlives the call
  const InCall call(implementation_, "destroy");
  if (!call.outermost())
    fail<Error>("Buffer::destroy within another call of the buffer, allowed: after it has returned");
  ending = std::move(implementation_);  // it is gone however the exchange with the others ends
  ending->destroy_collectively();
}
bool Buffer::destroyed() const { return implementation_ == nullptr; }

}  // namespace deep_ep
