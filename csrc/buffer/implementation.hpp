// What a Buffer is made of: a runtime, and a class for each mode.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "csrc/buffer/dispatch_layout.hpp"
#include "csrc/buffer/internode/internode.hpp"
#include "csrc/buffer/intranode/intranode.hpp"
#include "csrc/buffer/low_latency/low_latency.hpp"
#include "csrc/buffer/runtime.hpp"
#include "csrc/support/home_process.hpp"
#include "deep_ep/buffer.hpp"

namespace deep_ep {

class Buffer::Implementation {
 public:
  /// Collective.
  Implementation(const std::shared_ptr<Bootstrap>& bootstrap, std::shared_ptr<Executor> executor,
                 const BufferOptions& options);
  ~Implementation();
  Implementation(const Implementation&) = delete;
  Implementation& operator=(const Implementation&) = delete;

  /// Are we in a child forked after this was made? Then it must not even be destroyed.
  bool inherited() const { return home_.left(); }
  Runtime& runtime() { return runtime_; }
  DispatchLayouts& layouts() { return *layouts_; }
  // Normal mode: here it is chosen by where the ranks are.
  DispatchResult dispatch(const DispatchArguments& arguments, const CallOptions& call);
  CachedDispatchResult cached_dispatch(const CachedDispatchArguments& arguments, const CallOptions& call);
  CombineResult combine(const CombineArguments& arguments, const CallOptions& call);
  // The second interface.
  template <class Arguments>
  auto dispatch_elastic(const Arguments& arguments, const CallOptions& call) {
    return intranode("dispatch_elastic").dispatch_elastic(arguments, call);
  }
  CombineResult combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call);
  EventHandle barrier(const CallOptions& call);
  // Replicas of experts.
  EventHandle prefetch_weights(const WeightPrefetch& weights, const CallOptions& call);
  EventHandle reduce_grads(const GradReduction& grads, const CallOptions& call);
  /// InvalidArgument, which names `call`, where the buffer was made without low-latency memory.
  LowLatency& low_latency(const char* call);

  std::string describe() const;
  void check(bool wait);
  void destroy_collectively();

 private:
  /// Among ranks of one node? If not, there are calls between nodes, or InvalidArgument, which names `call`.
  bool inside_one_node(const char* call) const;
  /// Of calls that there are inside a node only.
  Intranode& intranode(const char* call);
  std::string describe_normal_mode() const;
  /// For whoever waits in vain: what has become of all that was posted to NICs. Empty where there is none.
  std::string describe_health() const;
  /// What this rank has posted has reached its peers.
  void drain() noexcept;
  void end_with_masks();
  /// The host waits for this rank's work, which may have failed.
  void settle_last_work() noexcept;

  const HomeProcess home_;
  Runtime runtime_;
  std::optional<DispatchLayouts> layouts_;
  std::optional<Intranode> intranode_;
  std::optional<Internode> internode_;
  std::optional<LowLatency> low_latency_;
};

}  // namespace deep_ep
