// The ends of a rank's queue pairs over one wire: their memory, and whoever executes what kernels write into it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "csrc/rdma/queue_pair_address.hpp"
#include "csrc/rdma/ring/failure.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep::rdma {

struct EndsOptions {
  std::vector<int> peers = {};         ///< rank at the other side of each end; a rank may be there several times
  std::vector<int> port_offsets = {};  ///< of each end among a NIC's bonded ports; empty: 0, 1, 2, ...
  std::uint32_t depth = 0;             ///< entries of each ring; a power of two from 64 to 32768
  std::uint32_t batch = 0;             ///< entries after which a kernel rings unasked, 1 to depth / 2
  bool long_messages = true;           ///< throughput counts, of messages of many rows: for a simulated NIC
};

struct QueuePairReport {
  std::string text;   ///< number, state, counters
  bool well = false;  ///< it can send, and all that was posted is complete and counted by the device
};

/// Made for a list of peers, then all are connected, then start() is called, then kernels use them. The heap and its
/// mappings outlive them. Destroying them stops whoever executes first.
class Ends {
 public:
  virtual ~Ends() = default;

  /// For the peer's connect().
  virtual QueuePairAddress address(std::size_t end) const = 0;
  /// `peer` is the address of the end at the other side. Returns what kernels need. RankMismatch where the two cannot
  /// talk.
  virtual RdmaPeerParams connect(std::size_t end, const QueuePairAddress& peer) = 0;
  virtual void start() = 0;

  /// Do kernels ring a device by themselves (handler `gpu`)?
  virtual bool rung_by_kernels() const { return false; }
  /// The first failure that was found, if there is one.
  virtual std::optional<Failure> failure() const = 0;
  /// Has everything that kernels have posted happened at the peers? What failed never will, and counts as done. No
  /// kernel may be posting.
  virtual bool idle() const = 0;
  /// What has become of all that was posted, for whoever waits in vain. No kernel may be posting.
  virtual std::string health() const {
    if (const std::optional<Failure> seen = failure()) return rdma::describe(*seen);
    return idle() ? "all that was posted has arrived" : "what was posted has not all arrived";
  }
  /// What the device says of each queue pair; empty where there is none to ask. No kernel may be posting.
  virtual std::vector<QueuePairReport> report() const { return {}; }
  /// "handler cpu, wire local".
  virtual std::string describe() const = 0;
};

}  // namespace deep_ep::rdma
