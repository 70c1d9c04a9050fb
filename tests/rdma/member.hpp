// A rank with a heap and connections, and a kernel that exchanges rows with its peers over them (exchange_kernel.cu).
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/executor/own_stream.hpp"
#include "csrc/memory/node_membership.hpp"
#include "csrc/rdma/connections.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/executor.hpp"
#include "tests/kernels/test_kernel.hpp"
#include "tests/rdma/exchange_kernel.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {

struct Member {
  Member(std::shared_ptr<Bootstrap> its_bootstrap, std::shared_ptr<Executor> its_executor,
         double timeout_s = patience(), const ExchangeRows& rows = {});
  ~Member();

  NodeMembership nodes(int ranks_per_node) const {
    return NodeMembership::of_domains(bootstrap->rank(), domains, ranks_per_node);
  }
  void connect(rdma::ConnectionOptions options, std::optional<rdma::RdmaSettings> settings = {}, int num_nics = 1);

  /// `epochs` exchanges with all peers that the channel reaches, which continue from the last launch; waits for their
  /// end. Throws nothing: see fault(), and exchange_rows().
  void launch(int channel, int epochs) {
    launch(connections->device_peers() + std::ptrdiff_t{channel} * bootstrap->size(), epochs);
  }
  /// The same over queue pairs [ranks] that kernels can read.
  void launch(const RdmaQueuePair* peers, int epochs);
  const FaultRecord& fault() const { return faults[0]; }
  /// Throws unless all rows of all epochs come, intact.
  void exchange_rows(int channel, int epochs = 3);
  /// Collective: makes the exchange usable again after one that failed.
  void start_again();

  std::shared_ptr<Bootstrap> bootstrap;
  std::shared_ptr<Executor> executor;
  ExchangeParams exchange;   ///< of the next launch
  std::vector<int> domains;  ///< of each rank the lowest rank that it shares memory with
  std::shared_ptr<SymmetricHeap> heap;
  Shared<FaultRecord> faults;
  Shared<std::uint64_t> numbers;  ///< wrong bytes, abort
  OwnStream stream;
  std::unique_ptr<rdma::Connections> connections;
};

}  // namespace deep_ep::test
