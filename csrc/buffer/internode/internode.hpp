// Normal mode between nodes of equally many consecutive ranks.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "csrc/buffer/normal_mode.hpp"
#include "csrc/rdma/connections.hpp"

namespace deep_ep {

class Internode final : public NormalMode {
 public:
  /// Collective. The runtime's layout has signals for it.
  explicit Internode(Runtime& runtime);

  ElasticDispatchResult dispatch_elastic(const ElasticDispatchArguments& arguments, const CallOptions& call) override;
  CombineResult combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call) override;
  EventHandle barrier(const CallOptions& call) override;

  /// For people: by how many queue pairs, and over which NIC.
  std::string describe() const;
  /// What has become of all that was posted.
  std::string health() const { return connections_->health(); }
  /// Throws SystemError for an operation that has failed.
  void check() const { connections_->check(); }
  /// After the last call. Its kernels have ended, but the last credit that they posted may not have reached the rails.
  void drain() noexcept { connections_->drain(rdma::Connections::drain_time(runtime_.timeout_s())); }

 private:
  /// Rows go where those of an earlier dispatch went.
  ElasticDispatchResult dispatch_elastic_again(const ElasticDispatchArguments& arguments, const CallOptions& call);
  void check_handle(const DispatchHandle& handle) const override;
  void check_room(const RowShape& rows) const override;
  void launch(DispatchParams& params, const Config& config, const DispatchHandle& handle,
              const DispatchOutputs& outputs, const CallScope& scope) override;
  void launch(CombineParams& params, const CombineArguments& arguments, const CallScope& scope) override;
  /// The rings of a dispatch, or of a combine, with rows of `row_bytes`, all included.
  void set_rings(TransferParams& params, const DispatchHandle& handle, std::size_t row_bytes, bool dispatches) const;
  /// The rings for rows of so many bytes, all included. OutOfMemory where the window is too small.
  Rings rings_for(std::size_t row_bytes) const;
  LocalRings local_rings_for(const Rings& rings, bool dispatches) const;
  /// Shares the warps of a block out among the roles. `fewest_local`: of local warps; 0 if this rank's rows lie in the
  /// heap.
  void plan_warps(TransferParams& params, const Config& config, int blocks, int most, int fewest_local) const;
  /// A copy in the heap, if there is room.
  std::optional<Tensor> copy_in_heap(const ConstTensorView& tensor, const CallScope& scope) const;

  NodeGrid grid_;
  std::unique_ptr<rdma::Connections> connections_;
  std::shared_ptr<RailState> rails_;
  std::shared_ptr<std::uint32_t> counters_;
  std::shared_ptr<std::uint64_t> sent_;
  std::shared_ptr<std::byte*> heaps_;  ///< device memory, [num_ranks]
};

}  // namespace deep_ep
