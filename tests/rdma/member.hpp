// A rank with a heap, connections and an exchange of rows over them.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/executor/backend.hpp"
#include "csrc/memory/node_membership.hpp"
#include "csrc/rdma/connections.hpp"
#include "deep_ep/bootstrap.hpp"
#include "tests/rdma/exchange.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {

struct Member {
  Member(std::shared_ptr<Bootstrap> its_bootstrap, std::shared_ptr<Executor> its_executor,
         double timeout_s = patience(), const ExchangeRows& its_rows = {})
      : bootstrap(std::move(its_bootstrap)),
        executor(std::move(its_executor)),
        rows(its_rows),
        heap(backend_of(executor)->create_heap(*bootstrap, heap_options())),
        exchange(std::make_unique<Exchange>(executor, heap->local(), bootstrap->rank(), bootstrap->size(), rows,
                                            timeout_s)) {}
  ~Member() {
    connections.reset();
    heap->unmap_peers();
  }

  HeapOptions heap_options() {
    return {.bytes_for = [this](std::span<const int> found) {
      domains.assign(found.begin(), found.end());
      return Exchange::heap_bytes(bootstrap->size(), rows);
    }};
  }
  NodeMembership nodes(int ranks_per_node) const {
    return NodeMembership::of_domains(bootstrap->rank(), domains, ranks_per_node);
  }
  void connect(rdma::ConnectionOptions options, std::optional<rdma::RdmaSettings> settings = {}, int num_nics = 1) {
    const std::vector<ProcessIdentity> processes = all_gather_values(*bootstrap, this_process());
    auto wire = rdma::AgreedWire::agree(*bootstrap, *executor, processes, std::move(settings));
    wire.num_nics = num_nics;
    connections =
        std::move(rdma::Connections::make(*bootstrap, executor, heap, std::array{std::move(options)}, wire).front());
  }
  /// Throws unless all rows of all epochs come.
  void exchange_rows(int channel, int epochs = 3) {
    exchange->launch(*connections, channel, epochs);
    exchange->synchronize();
    exchange->require_all_arrived();
    connections->check();
  }

  /// Collective: makes the exchange usable again after one that failed.
  void start_again() {
    const StreamHandle stream = executor->create_stream();
    executor->fill(heap->local(), 0, heap->bytes(), stream);
    executor->synchronize(stream);
    executor->destroy_stream(stream);
    exchange = std::make_unique<Exchange>(executor, heap->local(), bootstrap->rank(), bootstrap->size(), rows);
    bootstrap->barrier();
  }

  std::shared_ptr<Bootstrap> bootstrap;
  std::shared_ptr<Executor> executor;
  ExchangeRows rows;
  std::vector<int> domains;  ///< of each rank the lowest rank that it shares memory with
  std::shared_ptr<SymmetricHeap> heap;
  std::unique_ptr<Exchange> exchange;
  std::unique_ptr<rdma::Connections> connections;
};

}  // namespace deep_ep::test
