// Normal mode among ranks of one node, which map each other's memory.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "csrc/buffer/intranode/plan.hpp"
#include "csrc/buffer/runtime.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/intranode/params.hpp"

namespace deep_ep {

struct DispatchOutputs;
struct ElasticDispatchParams;
struct SpreadRowsParams;

class Intranode {
 public:
  explicit Intranode(Runtime& runtime);

  DispatchResult dispatch(const DispatchArguments& arguments, const CallOptions& call);
  CachedDispatchResult dispatch(const CachedDispatchArguments& arguments, const CallOptions& call);
  CombineResult combine(const CombineArguments& arguments, const CallOptions& call);
  // Of the second interface: csrc/buffer/elastic/.
  ElasticDispatchResult dispatch_elastic(const ElasticDispatchArguments& arguments, const CallOptions& call);
  ElasticCachedDispatchResult dispatch_elastic(const ElasticCachedDispatchArguments& arguments,
                                               const CallOptions& call);
  CombineResult combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call);
  EventHandle barrier(const CallOptions& call);
  // csrc/buffer/load_balance/.
  EventHandle prefetch_weights(const WeightPrefetch& weights, const CallOptions& call);
  EventHandle reduce_grads(const GradReduction& grads, const CallOptions& call);

 private:
  /// Exchanges counts. Returns a handle without what only the dispatch itself knows.
  DispatchHandle notify(const DispatchArguments& arguments, CallScope& scope);
  /// With exact sizes: waits for the counts, and puts them into the result.
  void learn_sizes(const DispatchArguments& arguments, CallScope& scope, DispatchResult& result);
  /// Room in the window for all rows of outputs that peers cannot write; nothing if they can, or if rows take turns.
  std::optional<DispatchOutputs> landing(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales,
                                         const DispatchArguments* fresh, const DispatchOutputs& outputs,
                                         const DispatchPlan& plan);
  /// Sends the rows to where the handle says, into `outputs`, which has room for `rows`.
  void send(DispatchPlan& plan, const DispatchHandle& handle, const DispatchOutputs& outputs, std::int64_t rows,
            CallScope& scope);
  /// Copies rows that a dispatch has landed in the window, by all multiprocessors.
  void copy_received(const DispatchPlan& plan, const DispatchHandle& handle, const DispatchOutputs& landed,
                     const DispatchOutputs& outputs, CallScope& scope);
  /// Takes all rows to the results, in passes. Where `sent` is fresh, those of the first pass have been sent.
  void move_elastic(ElasticDispatchParams& sent, SpreadRowsParams& moving, const Config& config, CallScope& scope);
  /// Hands out what the outputs and the handle hold.
  static void hand_out(const DispatchOutputs& outputs, const DispatchHandle& handle, CallScope& scope);

  Runtime& runtime_;
  NormalModeSetup setup_;
  std::shared_ptr<KernelState> state_;
  std::shared_ptr<HostCounts> host_counts_;  ///< pinned
  IntranodeParams common_;                   ///< what every kernel is told
};

}  // namespace deep_ep
