// Normal mode among ranks of one node, which map each other's memory.
#pragma once

#include <memory>
#include <optional>

#include "csrc/buffer/normal_mode.hpp"
#include "kernels/normal/params.hpp"

namespace deep_ep {

struct ElasticDispatchParams;
struct ElasticOutputs;
struct RowTables;

class Intranode final : public NormalMode {
 public:
  explicit Intranode(Runtime& runtime);

  ElasticDispatchResult dispatch_elastic(const ElasticDispatchArguments& arguments, const CallOptions& call) override;
  ElasticCachedDispatchResult dispatch_elastic(const ElasticCachedDispatchArguments& arguments,
                                               const CallOptions& call) override;
  CombineResult combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call) override;
  EventHandle barrier(const CallOptions& call) override;
  // csrc/buffer/load_balance/.
  EventHandle prefetch_weights(const WeightPrefetch& weights, const CallOptions& call);
  EventHandle reduce_grads(const GradReduction& grads, const CallOptions& call);

 private:
  void notify(const NotifyCall& notify, DispatchHandle& handle, const CallScope& scope) override;
  void send(const SentRows& rows, const Config& config, const DispatchHandle& handle, const DispatchOutputs& outputs,
            int weights, const CallScope& scope) override;
  void add_up(const CombineArguments& arguments, const CombineResult& result, const CallScope& scope) override;
  /// Takes all rows to the results, in passes. Where `sent` is fresh, those of the first pass have been sent.
  void move_elastic(ElasticDispatchParams& sent, const ElasticOutputs& outputs, const RowTables& tables,
                    const std::optional<ConstTensorView>& counts, int alignment, const Config& config,
                    CallScope& scope);

  /// Without what only dispatch or combine knows. A local ring has slots of `row_bytes`, all included.
  TransferParams transfer(const DispatchHandle& handle, std::size_t row_bytes, const RingWords& words, Wanted row,
                          Wanted room) const;

  std::shared_ptr<KernelState> state_;
  std::shared_ptr<std::uint32_t> local_tickets_;
  NormalParams common_;  ///< what every kernel is told
};

}  // namespace deep_ep
