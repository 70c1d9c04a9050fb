#include "tests/rdma/exchange.hpp"

#include <stdexcept>
#include <utility>

#include "csrc/rdma/ring/failure.hpp"

namespace deep_ep::test {
namespace {

const TestKernel<ExchangeParams> kExchange(DEEP_EP_TEST_LAUNCHERS(rdma_exchange));

ExchangeParams shape(int num_ranks, int rows) {
  ExchangeParams params;
  params.num_ranks = num_ranks;
  params.rows = rows;
  return params;
}

}  // namespace

std::size_t Exchange::heap_bytes(int num_ranks, int rows) { return shape(num_ranks, rows).heap_bytes(); }

Exchange::Exchange(std::shared_ptr<Executor> executor, std::byte* heap, int rank, int num_ranks, int rows,
                   double timeout_s)
    : executor_(std::move(executor)), faults_(*executor_, 2), wrong_(*executor_, 1), params_(shape(num_ranks, rows)) {
  abort_ = static_cast<std::uint64_t*>(executor_->allocate(sizeof(std::uint64_t)));
  stream_ = executor_->create_stream();
  executor_->fill(abort_, 0, sizeof(std::uint64_t), stream_);
  executor_->synchronize(stream_);
  params_.rank = rank;
  params_.heap = heap;
  params_.wrong_words = wrong_.data();
  params_.wait = {faults_.data(), abort_, static_cast<std::uint64_t>(timeout_s * 1e9)};
}

Exchange::~Exchange() {
  executor_->destroy_stream(stream_);
  executor_->free(abort_);
}

void Exchange::launch(const RdmaPeerParams* peers, int epochs) {
  params_.peers = peers;
  params_.epochs = epochs;
  kExchange(*executor_, stream_, {params_.num_ranks, 32, 0}, params_);
  params_.first_epoch += epochs;
}

void Exchange::require_all_arrived() const {
  if (fault().claimed != 0) throw std::runtime_error(rdma::describe_fault(params_.rank, fault()));
  if (wrong_words() != 0) throw std::runtime_error(std::to_string(wrong_words()) + " words are wrong");
}

}  // namespace deep_ep::test
