// The ends of a rank's queue pairs over one wire: their memory, and whoever executes what kernels write into it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/rdma/queue_pair_address.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep::rdma {

/// A set of queue pairs: one for each channel and peer.
struct ConnectionOptions {
  int rank = 0;  ///< this one; Connections fill it in
  /// Ranks reached by RDMA, never this one. If rank a names rank b, b names a.
  std::vector<int> peers = {};
  /// Queue pairs per peer, equal on all ranks: kernels that run at the same time use different channels.
  int channels = 1;
  /// Channel n is lane n / kinds of calls of kind n % kinds. The lanes of a kind carry rows at the same time, and so do
  /// kinds: where physical ports of a NIC are bonded, neighbours of either leave by different ports, see port_offset().
  int kinds = 1;
  std::uint32_t depth = 1024;  ///< entries of each ring; a power of two from 64 to 32768
  std::uint64_t sink = 0;      ///< place in the heap of a word where old values of additions go, which nothing reads
  /// Of so many NICs of the rank the one that these ends are on. It has channels nic, nic + num_nics, ...; Connections
  /// fill them in.
  int nic = 0, num_nics = 1;
  bool long_messages = true;  ///< throughput counts, of messages of many rows: for a simulated NIC
  /// Ranks of a node, where the fabric connects rails only; else 0. A peer with another index in its node than this
  /// rank is then reached over this rank's rail: a NIC of the peer's node receives for it, see Ends::landing().
  int rail_width = 0;
  /// Only tries whether peers are reached: gives up after a second or two.
  bool hasty = false;
  /// Of channels 2n and 2n + 1 each meets the peer's other one, so that each direction has queue pairs of its own.
  bool crossed = false;

  /// Ends are numbered channel by channel, in the order of `peers`.
  std::size_t ends() const {
    return peers.size() * static_cast<std::size_t>((channels - nic + num_nics - 1) / num_nics);
  }
  int peer(std::size_t end) const { return peers[end % peers.size()]; }
  int channel(std::size_t end) const { return nic + num_nics * static_cast<int>(end / peers.size()); }
  /// The end that the peer connects with this one.
  std::size_t other(std::size_t end) const {
    const std::size_t channel = end / peers.size();
    return crossed ? (channel ^ 1) * peers.size() + end % peers.size() : end;
  }
  int rail_of(int rank) const { return rank % rail_width; }
  /// Is the peer at this end reached by a landing?
  bool lands(std::size_t end) const { return rail_width != 0 && rail_of(peer(end)) != rail_of(rank); }
  /// The end's physical port is this modulo the number of ports.
  int port_offset(std::size_t end) const {
    return channel(end) / kinds + channel(end) % kinds + static_cast<int>(end % peers.size());
  }
  /// Of all ends. A kernel rings unasked after so many entries that the rows of a warp and the word behind them go by
  /// one doorbell. `shape`: where the rings lie.
  RingOptions rings(RingOptions shape = {}) const {
    shape.count = ends();
    shape.depth = depth;
    shape.batch = std::min(depth / 2, 64U);
    return shape;
  }
};

/// Made for a set of queue pairs, then all are connected, then start() is called, then kernels use them. The heap and
/// its mappings outlive them. Destroying them stops whoever executes first.
class Ends {
 public:
  virtual ~Ends() = default;

  /// For the peer's connect(). Ends of one object differ only in the number of the queue pair.
  virtual QueuePairAddress address(std::size_t end) const = 0;
  /// `peer` is the address of the end at the other side. Returns what kernels need. RankMismatch where the two cannot
  /// talk.
  virtual RdmaQueuePair connect(std::size_t end, const QueuePairAddress& peer) = 0;
  /// On a fabric that connects rails only, an end whose peer is on another rail sends over this rank's rail, and the
  /// peer receives by the NIC that its node has on that rail: by a landing, a queue pair of the peer's that sends
  /// nothing. This is this rank's, by which the end's peer writes to this rank's heap; those of one rail differ only in
  /// the number of the queue pair.
  virtual QueuePairAddress landing(std::size_t end) const { return address(end); }
  virtual void connect_landing(std::size_t /*end*/, const QueuePairAddress& /*peer*/) {}
  /// In the place of start(): sends to the peer that the end is connected to, and waits until it has come. SystemError:
  /// it has not. Wires that reach all that they connect send nothing.
  virtual void reach(std::size_t /*end*/, const QueuePairAddress& /*peer*/) {}
  virtual void start() = 0;

  virtual NicHandler handler() const { return NicHandler::cpu; }
  /// "handler cpu, wire local".
  virtual std::string describe() const = 0;
  /// The first failure that was found; empty: none. Also one of rings whose completions the host can read. Those in
  /// GPU memory are watched by the kernels alone, which put failures on record (FaultKind::rdma_failed).
  std::string failure() const;
  /// Has everything that kernels have posted happened at the peers? What failed never will, and counts as done. No
  /// kernel may be posting.
  bool idle() const { return std::ranges::all_of(rings_->status(), &RingStatus::done); }
  /// What has become of all that was posted, for whoever waits in vain. No kernel may be posting.
  virtual std::string health() const;

 protected:
  Ends() = default;
  Ends(ConnectionOptions options, std::string device) : options_(std::move(options)), device_(std::move(device)) {}

  /// The first failure that the thread or kernel that executes has found.
  virtual std::string executor_failure() const = 0;
  /// What kernels need to reach `peer` by the end's queue pair, which has this number, with a handler that reads
  /// producer indices. `heap_key`: of this rank's heap.
  RdmaQueuePair params_of(std::size_t end, std::uint32_t number, std::uint32_t heap_key,
                          const QueuePairAddress& peer) const;
  /// Says why an end that has not failed is late; empty: it is not.
  virtual std::string trouble(std::size_t end, const RingStatus& ring) const;

  ConnectionOptions options_;
  std::string device_;  ///< NIC and port, or wire, for messages
  std::optional<RingMemory> rings_;

 private:
  std::string failure_of(std::size_t end, const device::rdma::CompletionEntry& completion) const;
};

}  // namespace deep_ep::rdma
