// A rank's RDMA connections: to every peer that it reaches by RDMA, an exclusive queue pair for each channel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "csrc/memory/process_identity.hpp"
#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/rdma/discovery/machine.hpp"
#include "csrc/rdma/discovery/settings.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep {
class Bootstrap;
class Executor;
}  // namespace deep_ep

namespace deep_ep::rdma {

struct ConnectionOptions {
  /// Ranks reached by RDMA, never this one. If rank a names rank b, b names a.
  std::vector<int> peers = {};
  /// Queue pairs per peer, equal on all ranks: kernels that run at the same time use different channels.
  int channels = 1;
  /// Of each channel, for NICs whose physical ports are bonded: a channel reaches the peer at place p of `peers` by the
  /// physical port (offset + p) modulo the number of ports. Channels that carry rows at the same time have consecutive
  /// offsets. Empty: the channels' numbers.
  std::vector<int> port_offsets = {};
  std::uint32_t depth = 1024;  ///< entries of each queue pair; a power of two from 64 to 32768
  /// Entries after which a kernel rings unasked, 1 to depth / 2. 0: half the depth, at most 64, so that the rows of a
  /// warp and the word behind them go by one doorbell.
  std::uint32_t batch = 0;
  bool long_messages = true;  ///< see EndsOptions
};

/// The wire of a buffer's RDMA traffic, as all ranks agree on it.
struct AgreedWire {
  WireKind kind = WireKind::local;
  NicHandler handler = NicHandler::automatic;
  bool may_fall_back = false;  ///< some rank leaves the handler open, and has a NIC
  RdmaSettings settings;
  std::optional<NicAssignment> nic;  ///< of this rank, for WireKind::verbs

  /// Collective. `needs_rdma`: this rank reaches others by RDMA. `processes`: of each rank. `settings`: by default
  /// those of the environment, where one rank's may be wrong while the others' are not. Throws on every rank:
  /// InvalidArgument for settings out of range, RankMismatch if the ranks ask for different wires, SystemError if a NIC
  /// is missing.
  static AgreedWire agree(Bootstrap& bootstrap, const Executor& executor, bool needs_rdma,
                          std::span<const ProcessIdentity> processes, std::optional<RdmaSettings> settings = {});
};

class Ends;
struct EndsOptions;

/// An end for each channel and peer, channel by channel.
EndsOptions ends_options(const ConnectionOptions& options);

/// Made collectively by all ranks of the bootstrap, including those that reach nobody by RDMA. Peers are reached in the
/// whole heap; work requests address it by offsets. Signals may lie anywhere in it: it is registered with strict
/// ordering.
///
/// Destruction is not collective. It stops the thread of the `cpu` handler, and nothing of this rank touches a peer's
/// heap afterwards; so it must come before SymmetricHeap::unmap_peers(). Kernels that use the connections must have
/// ended. What they posted may still be under way and would be lost: see drain().
class Connections {
 public:
  /// InvalidArgument for options out of range, RankMismatch if the ranks do not fit together, SystemError if a NIC
  /// refuses; on every rank if it fails on one.
  Connections(Bootstrap& bootstrap, std::shared_ptr<Executor> executor, std::shared_ptr<SymmetricHeap> heap,
              ConnectionOptions options, AgreedWire wire);
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  /// [channels][ranks] in memory that kernels of this rank read; the address stays the same for life. Entries of
  /// ranks that are not reached by RDMA have queue.depth == 0 and nothing else.
  const RdmaPeerParams* device_peers() const { return device_peers_; }
  /// The same, as the host sees it.
  const RdmaPeerParams& peer(int channel, int rank) const;
  bool reaches(int rank) const;
  /// False after new connections could not be made: kernels must not use the old ones, which are gone.
  bool connected() const { return connected_; }

  /// Throws SystemError for the first operation that failed, as far as the host sees it: the `cpu` handler sees all,
  /// the `gpu` handler those of rings in host memory (kernels put the others on record), and queue pairs of which
  /// the device says that they have failed.
  void check() const;

  /// One sentence for whoever waits in vain: what the NIC says of all that was posted. Empty where nobody is reached.
  /// No kernel may be posting.
  std::string health() const;

  /// Waits until all that kernels have posted has happened at the peers or has failed. Kernels that use the connections
  /// must have ended. False, and a warning, if it takes more than `most_s` seconds.
  bool drain(double most_s) const;
  /// The same before a buffer ends whose calls wait `timeout_s` (0: for ever): at most 10 s, and no exception. `rank`
  /// is named where that cannot be told.
  void drain_at_end(int rank, double timeout_s) const noexcept;

  /// Collective, while no kernel of any rank uses the connections: destroys all queue pairs and makes new ones. Failed
  /// ones work again; nothing is outstanding. Throws like the constructor; kernels must not use the connections then.
  void reconnect(Bootstrap& bootstrap);

  /// "7 peers x 3 channels, handler cpu, wire local".
  std::string describe() const;

 private:
  void connect(Bootstrap& bootstrap);

  std::shared_ptr<Executor> executor_;
  std::shared_ptr<SymmetricHeap> heap_;
  ConnectionOptions options_;
  AgreedWire wire_;
  int num_ranks_ = 0;
  std::vector<RdmaPeerParams> peers_;  ///< [channels][ranks]
  RdmaPeerParams* device_peers_ = nullptr;
  bool connected_ = false;
  std::unique_ptr<Ends> ends_;  ///< null where nobody is reached; last: uses the rest
};

}  // namespace deep_ep::rdma
