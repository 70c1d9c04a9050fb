// The public class: refuses use after destroy and in forked children. Calls of the modes are beside their plans:
// normal_mode.cpp, elastic/, load_balance/, low_latency/.
#include "deep_ep/buffer.hpp"

#include <set>
#include <utility>
#include <vector>

#include "csrc/buffer/low_latency/low_latency.hpp"
#include "csrc/buffer/normal_mode.hpp"
#include "csrc/buffer/runtime.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep {

LowLatency& BufferCall::low_latency() const {
  if (runtime_.low_latency) return *runtime_.low_latency;
  fail<InvalidArgument>(
      "{} needs low-latency memory, but the buffer's low_latency.bytes is 0: see Buffer::low_latency_bytes_hint",
      name_);
}

LowLatency& BufferCall::masking() const {
  LowLatency& mode = low_latency();
  if (runtime_.options().low_latency.masking) return mode;
  fail<InvalidArgument>("{}: the buffer was made without low_latency.masking", name_);
}

Buffer::Buffer(std::shared_ptr<Bootstrap> bootstrap, std::shared_ptr<Executor> executor, const BufferOptions& options)
    : runtime_(std::make_unique<Runtime>(bootstrap, std::move(executor), options)) {}
Buffer::~Buffer() { Runtime::end(std::move(runtime_)); }
Buffer::Buffer(Buffer&&) noexcept = default;
Buffer& Buffer::operator=(Buffer&& other) noexcept {
  Buffer previous(std::move(other));
  runtime_.swap(previous.runtime_);
  return *this;
}

int Buffer::count_nodes(const std::shared_ptr<Bootstrap>& bootstrap, const std::shared_ptr<Executor>& executor,
                        int ranks_per_node) {
  if (!bootstrap) throw InvalidArgument("bootstrap is null");
  BufferExchanges exchanges(bootstrap);
  const std::shared_ptr<Backend> backend = backend_of(executor);
  const DeviceScope device(*executor);
  int nodes = 0;
  exchanges.agree("counting nodes", [&] {
    const int width = asked_for_ranks_per_node(ranks_per_node, exchanges.size());
    const auto heap = backend->create_heap(exchanges, [&](std::span<const int> domains) {
      nodes = NodeMembership::of_domains(exchanges.rank(), domains, width).num_nodes;
      return std::size_t{0};  // the smallest
    });
    exchanges.barrier();  // no rank's memory goes while another one maps it
  });
  return nodes;
}

int Buffer::rank() const { return alive(runtime_, "rank").rank(); }
int Buffer::num_ranks() const { return alive(runtime_, "num_ranks").num_ranks(); }
int Buffer::num_nodes() const { return alive(runtime_, "num_nodes").nodes().num_nodes; }
Executor& Buffer::executor() const { return *alive(runtime_, "executor").executor(); }
StreamHandle Buffer::comm_stream() const { return alive(runtime_, "comm_stream").comm_stream(); }
const BufferOptions& Buffer::options() const { return alive(runtime_, "options").options(); }
std::string Buffer::describe() const { return alive(runtime_, "describe").describe(); }
std::vector<int> Buffer::lost_ranks() const {
  const Runtime& runtime = alive(runtime_, "lost_ranks");
  std::set<int> lost;
  for (int rank = 0; rank < runtime.num_ranks(); ++rank) lost.insert(control::lost_for(runtime.control_words(), rank));
  lost.erase(control::kNobody);
  return {lost.begin(), lost.end()};
}

Tensor Buffer::allocate_tensor(DType dtype, std::initializer_list<std::int64_t> shape, StreamHandle stream) {
  const BufferCall in(runtime_, "allocate_tensor");
  const TensorView wanted = unplaced(in->device(), dtype, shape);
  // There is no event here, so the caller's stream waits until the memory is free.
  CallScope scope = in->begin({.stream = stream});
  if (scope.recording()) {
    throw InvalidArgument(
        "allocate_tensor: the stream is being recorded into a CUDA graph, allowed: before that begins");
  }
  const std::vector<Tensor> made = scope.tensors({&wanted, 1}, true);
  if (made.empty()) {
    fail<OutOfMemory>("{} does not fit the heap of {}: raise heap_bytes or drop received tensors earlier",
                      wanted.describe(), format_bytes(in->options().heap_bytes));
  }
  scope.hand_out({&made.front()});
  scope.finish();
  return made.front();
}
bool Buffer::in_heap(const ConstTensorView& tensor) const { return alive(runtime_, "in_heap").in_heap(tensor); }
TensorView Buffer::local_memory() const {
  const BufferCall in(runtime_, "local_memory");
  const auto bytes = static_cast<std::int64_t>(in->heap()->bytes() - in->layout().window_at());
  return TensorView::contiguous(in->window(), DType::uint8, {bytes}, in->device());
}

void Buffer::suspend() {
  const BufferCall in(runtime_, "suspend");
  if (in->uses_rdma()) {
    throw Unsupported(
        "suspend: RDMA reaches ranks of this buffer, and NICs hold its memory, allowed: ranks of one node");
  }
  BufferExchanges& exchanges = in->bootstrap();
  exchanges.begin(Purpose::sleeping);
  exchanges.agree("suspend", [&] {
    if (in->executor()->is_capturing(in->comm_stream())) {
      throw InvalidArgument("suspend: calls are being recorded into a CUDA graph, and the host waits for calls");
    }
    in->check(true);
    exchanges.barrier();  // a peer may have read here until now
    in->heap()->keep(exchanges);
  });
  in->suspended_ = true;
  in->heap()->release_memory();
  exchanges.barrier();  // the system has the memory of all ranks
  in->calls().cache->give_back_unused();
}

void Buffer::resume() {
  const BufferCall in(runtime_, "resume", true);
  if (!in->suspended_) throw InvalidArgument("resume: the buffer is not suspended");
  const DeviceScope device(*in->executor());
  in->bootstrap().begin(Purpose::sleeping);
  in->bootstrap().agree("resume", [&] { in->heap()->resume(in->bootstrap()); });
  in->suspended_ = false;
}

void Buffer::check(bool wait) {
  const BufferCall in(runtime_, "check", true);
  in->check(wait);
}

void Buffer::destroy() {
  // It is gone however the exchange with the others ends.
  struct Ending {
    std::unique_ptr<Runtime> runtime;
    ~Ending() { Runtime::end(std::move(runtime)); }
  } gone;  // outlives the call
  const BufferCall call(runtime_, "destroy", true);
  if (!call.outermost()) {
    fail<Error>("Buffer::destroy within another call of the buffer, allowed: after it has returned");
  }
  gone.runtime = std::move(runtime_);
  Runtime* const ending = gone.runtime.get();
  if (!ending->settle_last_work()) return static_cast<void>(gone.runtime.release());
  // After a fault that breaks the buffer, a rank may never come. Any other fault may be known to this rank alone, and
  // its peers would wait for it. The others go on without a rank that they have masked. It does not wait for them; nor
  // they for it.
  if (ending->faults().broken() || ending->faults().given_up()) return;
  ending->drain();
  if (ending->options().low_latency.masking) {
    // All that this rank has posted has arrived before the others hear that it is here, and free their memory. Those
    // that are lost never come, so ranks meet in the control plane: it knows who is. Then each ends alone.
    ending->membership()->meet(2 * ending->timeout_s());
    ending->membership()->leave(control::Goodbye::ended);
    return ending->low_latency->log_masks(true);
  }
  BufferExchanges& exchanges = ending->bootstrap();
  exchanges.begin(Purpose::destroying);
  // A rank that is in a call which this one has not made does not wait for it.
  if (ending->membership() != nullptr) ending->membership()->leave(control::Goodbye::meets);
  try {
    exchanges.barrier();  // nobody writes to a peer any more
    ending->connections_.clear();
    ending->heap()->unmap_peers();
    exchanges.barrier();  // and now no rank maps a peer
    if (ending->membership() != nullptr) ending->membership()->leave(control::Goodbye::ended);
  } catch (const PeerLeft& left) {
    // The buffer is broken for another rank alone, and that rank has gone on: this one does not wait for it, either.
    log::info("buffer: rank {} is destroyed alone: {}", ending->rank(), left.what());
  }
}
bool Buffer::destroyed() const { return runtime_ == nullptr; }

}  // namespace deep_ep
