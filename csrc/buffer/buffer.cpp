// The public class: refuses use after destroy, and passes on.
#include "deep_ep/buffer.hpp"

#include "csrc/buffer/implementation.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep {
namespace {

template <class Implementation>
Implementation& alive(const std::unique_ptr<Implementation>& implementation, const char* call) {
  if (!implementation) fail<UseAfterDestroy>("Buffer::{} after destroy", call);
  return *implementation;
}

}  // namespace

Buffer::Buffer(std::shared_ptr<Bootstrap> bootstrap, std::shared_ptr<Executor> executor, const BufferOptions& options)
    : implementation_(std::make_unique<Implementation>(std::move(bootstrap), std::move(executor), options)) {}
Buffer::~Buffer() = default;
Buffer::Buffer(Buffer&&) noexcept = default;
Buffer& Buffer::operator=(Buffer&&) noexcept = default;

int Buffer::rank() const { return alive(implementation_, "rank").rank(); }
int Buffer::num_ranks() const { return alive(implementation_, "num_ranks").num_ranks(); }
Executor& Buffer::executor() const { return alive(implementation_, "executor").executor(); }
StreamHandle Buffer::comm_stream() const { return alive(implementation_, "comm_stream").comm_stream(); }
const BufferOptions& Buffer::options() const { return alive(implementation_, "options").options(); }

DispatchLayout Buffer::get_dispatch_layout(const TensorView& topk_idx, int num_experts, const CallOptions& call) {
  return alive(implementation_, "get_dispatch_layout").get_dispatch_layout(topk_idx, num_experts, call);
}
DispatchResult Buffer::dispatch(const DispatchArguments& arguments, const CallOptions& call) {
  return alive(implementation_, "dispatch").dispatch(arguments, call);
}
CombineResult Buffer::combine(const CombineArguments& arguments, const CallOptions& call) {
  return alive(implementation_, "combine").combine(arguments, call);
}

LowLatencyDispatchResult Buffer::low_latency_dispatch(const LowLatencyDispatchArguments& arguments,
                                                      const CallOptions& call) {
  return alive(implementation_, "low_latency_dispatch").low_latency_dispatch(arguments, call);
}
LowLatencyCombineResult Buffer::low_latency_combine(const LowLatencyCombineArguments& arguments,
                                                    const CallOptions& call) {
  return alive(implementation_, "low_latency_combine").low_latency_combine(arguments, call);
}
TensorView Buffer::low_latency_combine_buffer(const LowLatencyHandle& handle) {
  return alive(implementation_, "low_latency_combine_buffer").low_latency_combine_buffer(handle);
}
void Buffer::low_latency_clean(const CallOptions& call) {
  alive(implementation_, "low_latency_clean").low_latency_clean(call);
}
void Buffer::low_latency_update_mask(int rank, bool masked, const CallOptions& call) {
  alive(implementation_, "low_latency_update_mask").low_latency_update_mask(rank, masked, call);
}
void Buffer::low_latency_query_mask(const TensorView& status, const CallOptions& call) {
  alive(implementation_, "low_latency_query_mask").low_latency_query_mask(status, call);
}
void Buffer::low_latency_clear_mask(const CallOptions& call) {
  alive(implementation_, "low_latency_clear_mask").low_latency_clear_mask(call);
}
void Buffer::low_latency_resume() { alive(implementation_, "low_latency_resume").low_latency_resume(); }

Tensor Buffer::allocate_tensor(DType dtype, std::initializer_list<std::int64_t> shape, const CallOptions& call) {
  Implementation& buffer = alive(implementation_, "allocate_tensor");
  for (const std::int64_t size : shape) {
    if (size < 0) fail<InvalidArgument>("shape has a dimension of {}, allowed: 0 or more", size);
  }
  return buffer.allocate_tensor(dtype, shape, call);
}
bool Buffer::in_heap(const TensorView& tensor) const { return alive(implementation_, "in_heap").in_heap(tensor); }

TensorView Buffer::local_memory() const { return alive(implementation_, "local_memory").local_memory(); }
TensorView Buffer::low_latency_memory() const {
  return alive(implementation_, "low_latency_memory").low_latency_memory();
}

void Buffer::check() { alive(implementation_, "check").check(); }

void Buffer::destroy() {
  alive(implementation_, "destroy").destroy_collectively();
  implementation_.reset();
}
bool Buffer::destroyed() const { return implementation_ == nullptr; }

std::size_t Buffer::heap_bytes_hint(int num_ranks, std::int64_t tokens, std::int64_t row_bytes, int num_topk) {
  // Worst case: every rank sends all its tokens to one. Row, scales of an 8-bit row (at most as many bytes as a 32nd of
  // it), top-k and index; a step for each tensor's alignment; then signals and window, which take a quarter.
  const std::int64_t rows = tokens * num_ranks;
  const std::int64_t sidecar = row_bytes / 32 + std::int64_t{num_topk} * 12 + 4;
  const auto tensors = static_cast<std::size_t>(rows * (row_bytes + sidecar)) + 8 * Arena::kAlignment;
  return (tensors + (std::size_t{16} << 20)) / 3 * 4;
}

}  // namespace deep_ep
