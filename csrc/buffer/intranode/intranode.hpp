// Normal mode among ranks of one node, which map each other's memory.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "csrc/buffer/normal_mode.hpp"
#include "csrc/buffer/runtime.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/intranode/params.hpp"

namespace deep_ep {

struct ElasticDispatchParams;
struct ElasticOutputs;
struct RowTables;

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

  /// Of arguments that are right, as a part of a call.
  DispatchResult dispatch(const DispatchArguments& arguments, CallScope& scope);

 private:
  /// Exchanges counts. Returns a handle without what only the dispatch itself knows, and, with exact sizes, the counts.
  DispatchHandle notify(const DispatchArguments& arguments, CallScope& scope, std::vector<int>& tokens_per_expert);
  /// Makes room for the rows that come, sends `sent` to where the handle says, and hands out what both hold. `fresh`:
  /// see make_outputs.
  DispatchOutputs send(const SentRows& sent, const Config& config, const ConstTensorView& x,
                       const std::optional<ConstTensorView>& x_scales, const DispatchArguments* fresh,
                       const DispatchHandle& handle, CallScope& scope);
  /// Takes all rows to the results, in passes. Where `sent` is fresh, those of the first pass have been sent.
  void move_elastic(ElasticDispatchParams& sent, const ElasticOutputs& outputs, const RowTables& tables,
                    const std::optional<ConstTensorView>& counts, int alignment, const Config& config,
                    CallScope& scope);

  Runtime& runtime_;
  NormalModeSetup setup_;
  std::shared_ptr<KernelState> state_;
  std::shared_ptr<HostCounts> host_counts_;  ///< pinned
  IntranodeParams common_;                   ///< what every kernel is told
};

}  // namespace deep_ep
