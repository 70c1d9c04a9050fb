// What an mlx5 device does with a ring that is rung through doorbell register and record: the model that the device's
// send queue is tested against. It checks doorbells; behind them the `cpu` handler executes, on the adversarial wire.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/rdma/ring/cpu_handler.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "tests/rdma/ring/adversarial_wire.hpp"

namespace deep_ep::test {

struct SoftwareNicOptions {
  bool loses_doorbells = false;  ///< now and then a doorbell is missed; the record recovers it
  bool flush_overwrites = true;  ///< entries behind a failed one each write a completion over the one before
};

class SoftwareNic {
 public:
  /// `handler`: of `rings`, on `wire`, which also draws the random numbers.
  SoftwareNic(AdversarialWire& wire, const rdma::RingMemory& rings, rdma::CpuHandler& handler,
              const SoftwareNicOptions& options)
      : wire_(wire), memory_(rings), handler_(handler), options_(options) {}

  /// Ring `i`, of i = 0, 1, ...; `pair` has a doorbell register and record in ordinary memory.
  void add(const RdmaQueuePair& pair);

  /// Does a little of everything.
  void step();

  /// What went wrong that must never happen, in words; empty if nothing did: doorbells that go back or too far, a
  /// doorbell that overtook its record, entries that were overwritten before they were complete.
  const std::string& violation() const { return violation_; }

 private:
  struct Ring {
    RdmaQueuePair pair;
    std::uint64_t* producer_index;  ///< entries that doorbell or record announced: what the handler may execute
    device::rdma::CompletionEntry* completion;
    std::uint64_t completed;
    std::uint64_t missed = 0;  ///< the doorbell word that was lost
  };

  void see_doorbell(Ring& ring);
  void see_completion(Ring& ring);
  void violate(const Ring& ring, const std::string& what);

  AdversarialWire& wire_;
  const rdma::RingMemory& memory_;
  rdma::CpuHandler& handler_;
  SoftwareNicOptions options_;
  std::vector<Ring> rings_;
  std::string violation_;
};

}  // namespace deep_ep::test
