// Two ends of RDMA connections in one process: each with its own opened device, memory, wire and queue pairs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "csrc/rdma/verbs/registration.hpp"
#include "csrc/rdma/verbs/verbs_wire.hpp"

namespace deep_ep::rdma::verbs::test {

/// For tests in which everything must arrive: soft-RoCE sends a packet again after 0.27 s, as often as it takes (which
/// is what a count of 7 means to it), so a busy machine does not look like a dead peer.
PathOptions patient_path(int gid_index);
/// For tests in which a peer goes away: gives up after 7 x 0.27 s.
PathOptions quick_path(int gid_index);

/// Memory at page-aligned addresses, registered so that work requests address it from 0.
class End {
 public:
  End(const std::string& device, std::size_t bytes, int queue_pairs, std::uint32_t depth, const PathOptions& path);

  std::span<std::byte> memory() { return {memory_.get(), bytes_}; }
  /// A word of the memory as the device's atomics see it.
  std::uint64_t word(std::size_t offset) const;
  VerbsWire& wire() { return *wire_; }
  QueuePair& pair(int i) { return *pairs_[static_cast<std::size_t>(i)]; }
  std::uint32_t local_key() const { return registration_->local_key(); }
  std::uint32_t remote_key() const { return registration_->remote_key(); }
  const std::shared_ptr<Device>& device() const { return device_; }

 private:
  struct FreeMemory {
    void operator()(std::byte* memory) const;
  };

  std::shared_ptr<Device> device_;
  std::size_t bytes_;
  std::unique_ptr<std::byte, FreeMemory> memory_;
  std::unique_ptr<Registration> registration_;
  std::unique_ptr<VerbsWire> wire_;
  std::vector<QueuePair*> pairs_;
};

/// Two connected ends on the two ends of the cable.
struct Ends {
  explicit Ends(const PathOptions& path);

  WireOperation write(std::uint64_t id, std::uint64_t from, std::uint64_t to, std::uint32_t bytes);

  End first;
  End second;
};

/// Posts all operations, as there is room, and polls until `completions` of them have been reported.
/// std::runtime_error after long_patience(), with what was reported.
std::vector<WireCompletion> run(Wire& wire, std::span<const WireOperation> operations, std::size_t completions);

/// Bytes that differ from their neighbours and from those of another seed.
void fill_pattern(std::span<std::byte> memory, std::uint64_t seed);

}  // namespace deep_ep::rdma::verbs::test
