// One rank that exchanges rows with its peers over Connections (exchange_kernel.cu), on the executor it is given.
#pragma once

#include <cstddef>
#include <memory>

#include "csrc/executor/own_stream.hpp"
#include "csrc/rdma/connections.hpp"
#include "deep_ep/executor.hpp"
#include "tests/kernels/test_kernel.hpp"
#include "tests/rdma/exchange_kernel.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {

/// Memory that the exchange needs besides heap and connections. A launch uses one channel.
class Exchange {
 public:
  /// `heap`: this rank's, with heap_bytes() of zeros.
  Exchange(std::shared_ptr<Executor> executor, std::byte* heap, int rank, int num_ranks, const ExchangeRows& rows = {},
           double timeout_s = patience());

  /// Heap that ranks need for one such exchange.
  static std::size_t heap_bytes(int num_ranks, const ExchangeRows& rows) {
    ExchangeParams params;
    params.num_ranks = num_ranks;
    params.rows = rows;
    return params.heap_bytes();
  }

  /// Enqueues `epochs` exchanges with all peers that the channel reaches; epochs continue from the last launch.
  void launch(const rdma::Connections& connections, int channel, int epochs) {
    launch(connections.device_peers() + std::ptrdiff_t{channel} * params_.num_ranks, epochs);
  }
  /// The same over queue pairs [ranks] that kernels can read.
  void launch(const RdmaPeerParams* peers, int epochs);
  /// Waits. Throws nothing: what went wrong is in the next two.
  void synchronize() { executor_->synchronize(stream_.get()); }

  const FaultRecord& fault() const { return faults_[0]; }
  /// Throws unless all rows came, intact.
  void require_all_arrived() const;
  /// Sends rows beyond the ends of the peers' heaps from now on, or (0) where they belong.
  void send_astray(std::uint64_t by) { params_.astray = by; }

 private:
  std::shared_ptr<Executor> executor_;
  Shared<FaultRecord> faults_;
  Shared<std::uint64_t> numbers_;  ///< wrong bytes, abort
  OwnStream stream_;
  ExchangeParams params_;
};

}  // namespace deep_ep::test
