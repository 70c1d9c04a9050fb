#include "tests/rdma/exchange.hpp"

#include <stdexcept>
#include <string>
#include <utility>

#include "csrc/rdma/ring/failure.hpp"

namespace deep_ep::test {
namespace {

const TestKernel<ExchangeParams> kExchange(DEEP_EP_TEST_LAUNCHERS(rdma_exchange));

}  // namespace

Exchange::Exchange(std::shared_ptr<Executor> executor, std::byte* heap, int rank, int num_ranks,
                   const ExchangeRows& rows, double timeout_s)
    : executor_(std::move(executor)),
      faults_(*executor_, 2),
      numbers_(*executor_, 2),
      stream_(*executor_),
      params_{.rank = rank,
              .num_ranks = num_ranks,
              .rows = rows,
              .heap = heap,
              .wrong_bytes = &numbers_[0],
              .wait = {faults_.data(), &numbers_[1], static_cast<std::uint64_t>(timeout_s * 1e9)}} {}

void Exchange::launch(const RdmaPeerParams* peers, int epochs) {
  params_.peers = peers;
  params_.epochs = epochs;
  kExchange(*executor_, stream_.get(), {params_.num_ranks, 32, 0}, params_);
  params_.first_epoch += epochs;
}

void Exchange::require_all_arrived() const {
  if (fault().claimed != 0) throw std::runtime_error(rdma::describe_fault(params_.rank, fault()));
  if (numbers_[0] != 0) throw std::runtime_error(std::to_string(numbers_[0]) + " bytes are wrong");
}

}  // namespace deep_ep::test
