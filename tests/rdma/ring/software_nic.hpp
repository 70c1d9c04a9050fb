// What an mlx5 device does with a ring that is rung through doorbell register and record: the model that the device's
// send queue is tested against. Execution itself is the adversarial wire's.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/rdma/params.hpp"
#include "tests/rdma/ring/adversarial_wire.hpp"

namespace deep_ep::test {

struct SoftwareNicOptions {
  bool loses_doorbells = false;  ///< now and then a doorbell is missed; the record recovers it
  bool flush_overwrites = true;  ///< entries behind a failed one each write a completion over the one before
};

class SoftwareNic {
 public:
  SoftwareNic(AdversarialWire& wire, const SoftwareNicOptions& options) : wire_(wire), options_(options) {}

  /// `pair` must use the device register, and its memory be ordinary memory.
  void add(const RdmaQueuePair& pair, std::uint64_t first_index);

  /// Does a little of everything.
  void step();

  /// What went wrong that must never happen, in words; empty if nothing did: doorbells that go back or too far, a
  /// doorbell that overtook its record, entries that are malformed or were overwritten before they were complete.
  const std::string& violation() const { return violation_; }

 private:
  struct Ring {
    RdmaQueuePair pair;
    std::uint64_t rung = 0;     ///< entries that doorbell or record announced
    std::uint64_t fetched = 0;  ///< entries read and posted to the wire
    std::uint64_t completed = 0;
    std::uint64_t missed = 0;  ///< the doorbell word that was lost
    bool failed = false;
  };

  void see_doorbell(Ring& ring);
  void fetch(Ring& ring);
  void complete(const rdma::WireCompletion& completion);
  void check_record(Ring& ring, std::uint64_t end);
  void violate(const Ring& ring, const std::string& what);

  AdversarialWire& wire_;
  SoftwareNicOptions options_;
  std::vector<Ring> rings_;
  std::string violation_;
};

}  // namespace deep_ep::test
