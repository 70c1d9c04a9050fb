#include "csrc/rdma/ends.hpp"

#include "csrc/rdma/ring/failure.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep::rdma {
namespace {

bool is_error(std::uint32_t tail) { return device::rdma::tail_opcode(tail) == device::rdma::kCompletionError; }

}  // namespace

std::string Ends::failure() const {
  if (std::string seen = executor_failure(); !seen.empty()) return seen;
  const bool looks = handler() != NicHandler::cpu && rings_->host_reads();  // that handler tells by itself
  for (std::size_t end = 0; looks && end < options_.ends(); ++end) {
    const device::rdma::CompletionEntry& completion = *rings_->completion(end);
    if (is_error(__atomic_load_n(&completion.tail, __ATOMIC_ACQUIRE))) return failure_of(end, completion);
  }
  return {};
}

std::string Ends::failure_of(std::size_t end, const device::rdma::CompletionEntry& completion) const {
  const std::uint32_t opcode_number = device::rdma::swap32(completion.opcode_number);
  // The device reports the lowest 16 bits of the index.
  return rdma::describe({.peer = options_.peer(end),
                         .device = device_,
                         .queue_pair = opcode_number & 0xffffffu,
                         .index = device::rdma::tail_counter(completion.tail),
                         .why = {completion.syndrome, completion.vendor_syndrome, opcode_number >> 24}});
}

RdmaQueuePair Ends::params_of(std::size_t end, std::uint32_t number, std::uint32_t heap_key,
                              const QueuePairAddress& peer) const {
  return {.ring = rings_->ring(end),
          .completion = rings_->completion(end),
          .doorbell = rings_->producer_index(end),
          .state = rings_->state(end),
          .number = number,
          .depth = rings_->options().depth,
          .batch = rings_->options().batch,
          .peer = options_.peer(end),
          .sink = {options_.sink, heap_key},
          .local_key = heap_key,
          .remote_key = peer.heap_key,
          .signal_key = peer.signal_key};
}

std::string Ends::trouble(std::size_t end, const RingStatus& ring) const {
  if (ring.outstanding() == 0) return {};
  return fmt::format("{} entries to rank {} are under way", ring.outstanding(), options_.peer(end));
}

std::string Ends::health() const {
  if (std::string seen = executor_failure(); !seen.empty()) return seen;
  std::vector<std::string> troubles;
  const std::vector<RingStatus> rings = rings_->status();
  for (std::size_t end = 0; end < rings.size(); ++end) {
    const device::rdma::CompletionEntry& completion = rings[end].completion;
    std::string found = is_error(completion.tail) ? failure_of(end, completion) : trouble(end, rings[end]);
    if (!found.empty()) troubles.push_back(std::move(found));
  }
  if (troubles.empty()) return "all that was posted has arrived";
  constexpr std::size_t kMost = 4;
  if (const std::size_t all = troubles.size(); all > kMost) {
    troubles.resize(kMost);
    troubles.push_back(fmt::format("and {} more", all - kMost));
  }
  return fmt::format("{}", fmt::join(troubles, "; "));
}

}  // namespace deep_ep::rdma
