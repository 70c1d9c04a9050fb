#include "csrc/buffer/implementation.hpp"

#include <exception>
#include <optional>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/interrupt.hpp"

namespace deep_ep {

Buffer::Implementation::Implementation(const std::shared_ptr<Bootstrap>& bootstrap, std::shared_ptr<Executor> executor,
                                       const BufferOptions& options)
    : runtime_(bootstrap, std::move(executor), options) {
  agree(runtime_.bootstrap(), "allocating memory for the calls of a Buffer", [&] {
    layouts_.emplace(runtime_);
    intranode_.emplace(runtime_);
  });
  if (runtime_.layout().internode.bytes != 0) internode_.emplace(runtime_);
  if (runtime_.options().low_latency.bytes != 0) low_latency_.emplace(runtime_);
  runtime_.faults().explain_timeouts_by([this] { return describe_health(); });
  runtime_.bootstrap().barrier();  // no rank signals before all ranks are ready
  log::info("buffer: rank {} of {} on {}, heap {}, of which window {}", runtime_.rank(), runtime_.num_ranks(),
            to_string(runtime_.device()), format_bytes(runtime_.heap()->bytes()),
            format_bytes(runtime_.layout().window_bytes));
}

Buffer::Implementation::~Implementation() {
  settle_last_work();
  drain();
}

std::string Buffer::Implementation::describe_health() const {
  const std::string normal = internode_ ? internode_->health() : std::string();
  std::string low_latency = low_latency_ ? low_latency_->health() : std::string();
  if (normal.empty() || normal == low_latency) return low_latency;
  return low_latency.empty() ? normal : fmt::format("{}. Low-latency calls: {}", normal, low_latency);
}

void Buffer::Implementation::drain() noexcept {
  if (internode_) internode_->drain();
  if (low_latency_) low_latency_->drain();
}

DispatchResult Buffer::Implementation::dispatch(const DispatchArguments& arguments, const CallOptions& call) {
  return inside_one_node("dispatch") ? intranode_->dispatch(arguments, call) : internode_->dispatch(arguments, call);
}

CachedDispatchResult Buffer::Implementation::cached_dispatch(const CachedDispatchArguments& arguments,
                                                             const CallOptions& call) {
  return inside_one_node("cached_dispatch") ? intranode_->dispatch(arguments, call)
                                            : internode_->dispatch(arguments, call);
}

CombineResult Buffer::Implementation::combine(const CombineArguments& arguments, const CallOptions& call) {
  return inside_one_node("combine") ? intranode_->combine(arguments, call) : internode_->combine(arguments, call);
}

CombineResult Buffer::Implementation::combine_elastic(const ElasticCombineArguments& arguments,
                                                      const CallOptions& call) {
  return intranode("combine_elastic").combine_elastic(arguments, call);
}

EventHandle Buffer::Implementation::barrier(const CallOptions& call) { return intranode("barrier").barrier(call); }

EventHandle Buffer::Implementation::prefetch_weights(const WeightPrefetch& weights, const CallOptions& call) {
  static_cast<void>(inside_one_node("prefetch_weights"));  // in each node by itself, of equally many ranks
  return intranode_->prefetch_weights(weights, call);
}

EventHandle Buffer::Implementation::reduce_grads(const GradReduction& grads, const CallOptions& call) {
  static_cast<void>(inside_one_node("reduce_grads"));  // in each node by itself, of equally many ranks
  return intranode_->reduce_grads(grads, call);
}

Intranode& Buffer::Implementation::intranode(const char* call) {
  if (runtime_.nodes().num_nodes == 1) return *intranode_;
  fail<InvalidArgument>("Buffer::{} is for ranks of one node, but the {} ranks are of {} nodes", call,
                        runtime_.num_ranks(), runtime_.nodes().num_nodes);
}

bool Buffer::Implementation::inside_one_node(const char* call) const {
  const NodeMembership& nodes = runtime_.nodes();
  if (nodes.num_nodes == 1 || internode_) return nodes.num_nodes == 1;
  fail<InvalidArgument>(
      "Buffer::{} needs nodes of equally many consecutive ranks, but the {} ranks are of {} nodes that are not", call,
      runtime_.num_ranks(), nodes.num_nodes);
}

LowLatency& Buffer::Implementation::low_latency(const char* call) {
  if (low_latency_) return *low_latency_;
  fail<InvalidArgument>(
      "{} needs low-latency memory, but the buffer's low_latency.bytes is 0: see Buffer::low_latency_bytes_hint", call);
}

void Buffer::Implementation::check(bool wait) {
  runtime_.executor()->make_current();
  try {
    if (wait) runtime_.calls().settle();
  } catch (const Interrupted&) {
    runtime_.faults().break_by_interruption();
  }
  runtime_.faults().raise();
  if (internode_) internode_->check();
  if (low_latency_) low_latency_->check();
}

void Buffer::Implementation::settle_last_work() noexcept {
  try {
    runtime_.executor()->make_current();
    runtime_.calls().settle();
  } catch (const std::exception& error) {
    log::warn("buffer: rank {} is destroyed after a failure: {}", runtime_.rank(), error.what());
  }
}

void Buffer::Implementation::destroy_collectively() {
  settle_last_work();
  // After a fault that breaks the buffer, a rank may never come. Any other fault may be known to this rank alone, and
  // its peers would wait for it. The others go on without a rank that they have masked. It does not wait for them; nor
  // they for it.
  if (runtime_.faults().broken() || runtime_.faults().given_up()) return;
  if (runtime_.options().low_latency.masking) return end_with_masks();
  drain();
  runtime_.bootstrap().begin(Purpose::destroying);
  try {
    runtime_.bootstrap().barrier();  // nobody writes to a peer any more
    internode_.reset();
    if (low_latency_) low_latency_->disconnect();
    runtime_.unmap_peers_together();
  } catch (const PeerLeft& left) {
    // The buffer is broken for another rank alone, and that rank has gone on: this one does not wait for it, either.
    log::info("buffer: rank {} is destroyed alone: {}", runtime_.rank(), left.what());
  }
}

void Buffer::Implementation::end_with_masks() {
  // What this rank has posted has arrived before the others hear that it is here, and free their memory.
  drain();
  // Those that are lost never come, so ranks meet in the control plane: it knows who is. Then each ends alone.
  const double most_s = 2 * runtime_.timeout_s();
  runtime_.membership()->meet(most_s);
  low_latency_->log_masks();
}

}  // namespace deep_ep
