// Normal mode among ranks of one node, which map each other's memory.
#pragma once

#include <memory>
#include <optional>

#include "csrc/buffer/normal_mode.hpp"

namespace deep_ep {

struct ElasticDispatchParams;

class Intranode final : public NormalMode {
 public:
  explicit Intranode(Runtime& runtime);

  ElasticDispatchResult dispatch_elastic(const ElasticDispatchArguments& arguments, const CallOptions& call) override;
  CombineResult combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call) override;
  EventHandle barrier(const CallOptions& call) override;
  // csrc/buffer/load_balance/.
  EventHandle prefetch_weights(const WeightPrefetch& weights, const CallOptions& call);
  EventHandle reduce_grads(const GradReduction& grads, const CallOptions& call);

 private:
  /// Rows go where those of an earlier dispatch went.
  ElasticDispatchResult dispatch_elastic_again(const ElasticDispatchArguments& arguments, const CallOptions& call);
  void launch(DispatchParams& params, const Config& config, const DispatchHandle& handle,
              const DispatchOutputs& outputs, const CallScope& scope) override;
  void launch(CombineParams& params, const CombineArguments& arguments, const CallScope& scope) override;
  /// Takes all rows to the results, in passes. Where `sent` is fresh, those of the first pass have been sent.
  void move_elastic(ElasticDispatchParams& sent, const ElasticDispatchResult& results,
                    const ElasticDispatchArguments& arguments, const ElasticDispatchHandle& handle, CallScope& scope);

  /// With slots of `row_bytes`, all included.
  LocalRings local_rings(std::size_t row_bytes, const RingWords& words, Wanted row, Wanted room) const {
    return LocalRings::make(runtime_.layout().window_at(), runtime_.layout().window_bytes, runtime_.num_ranks(),
                            runtime_.num_ranks(), row_bytes, words, row, room);
  }

  std::shared_ptr<std::uint32_t> local_tickets_;
};

}  // namespace deep_ep
