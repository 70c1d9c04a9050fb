#include "tests/rdma/member.hpp"

#include <algorithm>
#include <array>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/bootstrap/buffer_exchanges.hpp"
#include "csrc/executor/backend.hpp"
#include "csrc/rdma/ring/failure.hpp"

namespace deep_ep::test {
namespace {

const TestKernel<ExchangeParams> kExchange(DEEP_EP_TEST_LAUNCHERS(rdma_exchange));

HeapBytes heap_bytes_of(Member& member) {
  return [&member](std::span<const int> found) {
    member.domains.assign(found.begin(), found.end());
    return member.exchange.heap_bytes();
  };
}

}  // namespace

Member::Member(std::shared_ptr<Bootstrap> its_bootstrap, std::shared_ptr<Executor> its_executor, double timeout_s,
               const ExchangeRows& rows)
    : bootstrap(std::move(its_bootstrap)),
      executor(std::move(its_executor)),
      exchange{.rank = bootstrap->rank(), .num_ranks = bootstrap->size(), .rows = rows},
      heap(backend_of(executor)->create_heap(*bootstrap, heap_bytes_of(*this))),
      faults(*executor, 2),
      numbers(*executor, 2),
      stream(*executor) {
  exchange.heap = heap->local();
  exchange.wrong_bytes = &numbers[0];
  exchange.wait = {faults.data(), &numbers[1], static_cast<std::uint64_t>(timeout_s * 1e9)};
}

Member::~Member() {
  connections.reset();
  heap->unmap_peers();
}

void Member::connect(rdma::ConnectionOptions options, std::optional<rdma::RdmaSettings> settings, int num_nics) {
  const std::vector<ProcessIdentity> processes = all_gather_values(*bootstrap, this_process());
  BufferExchanges exchanges(bootstrap);
  exchanges.agree("connecting", [&] {
    auto wire = rdma::AgreedWire::agree(exchanges, *executor, processes, std::move(settings));
    wire.num_nics = num_nics;
    options.sink = exchange.sink();
    connections =
        std::move(rdma::Connections::make(exchanges, executor, heap, std::array{std::move(options)}, wire).front());
    exchanges.barrier();
  });
}

void Member::launch(const RdmaQueuePair* peers, int epochs) {
  exchange.peers = peers;
  exchange.epochs = epochs;
  kExchange(*executor, stream.get(), {exchange.num_ranks, 32, 0}, exchange);
  exchange.first_epoch += epochs;
  executor->synchronize(stream.get());
}

void Member::exchange_rows(int channel, int epochs) {
  launch(channel, epochs);
  if (fault().claimed != 0) throw std::runtime_error(rdma::describe_fault(exchange.rank, fault()));
  if (numbers[0] != 0) throw std::runtime_error(std::to_string(numbers[0]) + " bytes are wrong");
  connections->check();
}

void Member::start_again() {
  executor->fill(heap->local(), 0, heap->bytes(), stream.get());
  executor->synchronize(stream.get());
  std::fill_n(faults.data(), 2, FaultRecord{});
  std::fill_n(numbers.data(), 2, 0);
  exchange.first_epoch = 1;
  exchange.astray = 0;
  bootstrap->barrier();
}

}  // namespace deep_ep::test
