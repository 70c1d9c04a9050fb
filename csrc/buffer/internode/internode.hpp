// Normal mode between nodes of equally many consecutive ranks.
#pragma once

#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/buffer/normal_mode.hpp"
#include "csrc/buffer/normal_mode_arguments.hpp"
#include "csrc/buffer/runtime.hpp"
#include "csrc/rdma/connections.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/internode/params.hpp"

namespace deep_ep {

class DispatchLayouts;

class Internode {
 public:
  /// Collective. The runtime's layout has signals for it.
  explicit Internode(Runtime& runtime);

  DispatchResult dispatch(const DispatchArguments& arguments, const CallOptions& call);
  CachedDispatchResult dispatch(const CachedDispatchArguments& arguments, const CallOptions& call);
  CombineResult combine(const CombineArguments& arguments, const CallOptions& call);
  // Of the second interface: csrc/buffer/elastic/.
  ElasticDispatchResult dispatch_elastic(const ElasticDispatchArguments& arguments, DispatchLayouts& layouts,
                                         const CallOptions& call);
  ElasticCachedDispatchResult dispatch_elastic(const ElasticCachedDispatchArguments& arguments,
                                               const CallOptions& call);
  EventHandle barrier(const CallOptions& call);

  /// For people: by how many queue pairs, and over which NIC.
  std::string describe() const;
  /// What has become of all that was posted.
  std::string health() const { return connections_->health(); }
  /// Throws SystemError for an operation that has failed.
  void check() const { connections_->check(); }
  /// After the last call. Its kernels have ended, but the last credit that they posted may not have reached the rails.
  void drain() noexcept { connections_->drain_at_end(runtime_.rank(), runtime_.timeout_s()); }

  /// Of arguments that are right, as a part of a call. Hands nothing out.
  DispatchResult dispatch(const DispatchArguments& arguments, CallScope& scope);

 private:
  /// Exchanges counts. Returns a handle without what only the dispatch itself knows, and, with exact sizes, the counts.
  DispatchHandle notify(const DispatchArguments& arguments, CallScope& scope, std::vector<int>& tokens_per_expert);
  /// Sends the rows to where the handle says. The last `weights` scales of a token are its weights.
  void send(const SentRows& rows, const Config& config, const DispatchHandle& handle, const DispatchOutputs& outputs,
            int weights, const CallScope& scope);
  /// Tensors of the handle. Its tables share their memory, but for that of relayed rows.
  static void hand_out(const DispatchHandle& handle, const CallScope& scope);
  /// With rows of `row_bytes`, all included, in `local_rings` local rings of each rank.
  TransferParams transfer(const DispatchHandle& handle, std::size_t row_bytes, int local_rings) const;
  /// TransferParams::shape, of a kind of call and of what its rows are made of.
  static std::uint32_t shape_of(std::initializer_list<std::uint32_t> numbers);
  /// The rings for rows of so many bytes, all included. OutOfMemory where the window is too small.
  Rings rings_for(std::size_t row_bytes) const;
  LocalRings local_rings_for(const Rings& rings, int count) const;
  /// OutOfMemory where the window is too small for a dispatch of such rows, wherever any rank's output lies.
  void check_room_for_dispatch(const RowShape& rows) const;
  /// Shares the warps of a block out among the roles; returns how many there are. `outside_heap`: this rank's rows lie
  /// outside the heap.
  int plan_warps(TransferParams& params, const Config& config, int blocks, int most, bool outside_heap) const;
  void check_handle(const DispatchHandle& handle) const;
  /// A copy in the heap, if there is room.
  std::optional<Tensor> copy_in_heap(const ConstTensorView& tensor, const CallScope& scope) const;

  Runtime& runtime_;
  NodeGrid grid_;
  NormalModeSetup setup_;  ///< what checks of arguments ask for
  std::unique_ptr<rdma::Connections> connections_;
  std::shared_ptr<InternodeState> state_;
  std::shared_ptr<RailState> rails_;
  std::shared_ptr<std::uint32_t> counters_;
  std::shared_ptr<std::byte*> heaps_;        ///< device memory, [num_ranks]
  std::shared_ptr<HostCounts> host_counts_;  ///< pinned
  InternodeParams common_;                   ///< what every kernel is told
};

}  // namespace deep_ep
