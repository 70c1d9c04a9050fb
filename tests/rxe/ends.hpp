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

/// Where a test's two ends are.
struct Cable {
  std::string name;
  std::string first_device;
  std::string second_device;
  int gid_index = 0;
};

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
  int pairs() const { return static_cast<int>(pairs_.size()); }
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

struct EndOptions {
  std::size_t bytes = std::size_t{4} << 20;
  int queue_pairs = 1;
  std::uint32_t depth = 64;
};

/// Two connected ends; pair i of the first talks to pair i of the second.
struct Ends {
  explicit Ends(const Cable& cable, const EndOptions& options = {});  ///< with a patient path
  Ends(const Cable& cable, const EndOptions& options, const PathOptions& path);

  WireOperation write(std::uint64_t id, std::uint64_t from, std::uint64_t to, std::uint32_t bytes);
  WireOperation write_inline(std::uint64_t id, std::span<const std::byte> bytes, std::uint64_t to);
  /// The old value goes to offset 0 of the first end's memory unless the test says otherwise.
  WireOperation fetch_add(std::uint64_t id, std::uint64_t to, std::uint64_t add);

  End first;
  End second;
};

/// Posts all operations, as there is room, and polls until `completions` of them have been reported.
/// std::runtime_error after long_patience(), with what was reported.
std::vector<WireCompletion> run(Wire& wire, std::span<const WireOperation> operations, std::size_t completions);

/// Bytes that differ from their neighbours and from those of another seed.
void fill_pattern(std::span<std::byte> memory, std::uint64_t seed);

}  // namespace deep_ep::rdma::verbs::test
