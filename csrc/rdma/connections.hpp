// A rank's RDMA connections: over which wire ranks reach each other, and to every peer that a rank reaches by RDMA an
// exclusive queue pair for each channel.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "csrc/memory/process_identity.hpp"
#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/rdma/connecting.hpp"
#include "csrc/rdma/discovery/nic_map.hpp"
#include "csrc/rdma/discovery/settings.hpp"

namespace deep_ep {
class Bootstrap;
class Executor;
}  // namespace deep_ep

namespace deep_ep::rdma {
/// What one rank knows of its wire; all-gathered, so that every rank decides on the same facts.
struct WireFacts {
  ProcessIdentity process = {};
  WireSetting wanted = {};
  NicHandler handler = NicHandler::automatic;
  Choice rail_only = Choice::automatic;
  std::array<char, 64> nic{};  ///< by which this rank, or one of its node, opens it; empty: none
  PathOptions path = {};
  int num_nics = 1;
  double bytes_per_ns = 50;            ///< of these; where it is not known, of 400 Gbit/s
  bool keeps_to_path = false;          ///< see keeps_to_path()
  std::array<char, 400> why_no_nic{};  ///< empty: it has one
};

/// automatic: `verbs` if every rank has a NIC, or if they are on several hosts; else `local`, with the first reason in
/// `why_local`. Throws the same on every rank: RankMismatch when they ask for different wires, SystemError, naming a
/// rank, when a wire cannot work.
WireKind choose_wire(std::span<const WireFacts> ranks, std::string& why_local);

/// The wire of a buffer's RDMA traffic, as all ranks agree on it.
struct AgreedWire {
  WireKind kind = WireKind::local;
  RdmaSettings settings;            ///< with the handler that this wire leaves, where only one is left
  std::vector<NicAssignment> nics;  ///< of this rank, for WireKind::verbs
  std::vector<WireFacts> ranks;
  double bytes_per_ns = 0;  ///< of the slowest rank's NICs
  int num_nics = 1;         ///< of a rank, for its channels in turn: as many as each rank has

  /// Collective, in a step that ranks agree on. `processes`: of each rank. `settings`: by default those of the
  /// environment, where one rank's may be wrong while the others' are not. Throws InvalidArgument for settings out of
  /// range, and on every rank RankMismatch if the ranks ask for different wires, SystemError if a NIC is missing.
  static AgreedWire agree(Bootstrap& bootstrap, const Executor& executor, std::span<const ProcessIdentity> processes,
                          std::optional<RdmaSettings> settings = {});
  /// Fills in kind, bytes_per_ns and num_nics as `ranks` say, the same on each rank; `why_local` as choose_wire does.
  void decide(std::string& why_local);
  /// Do queue pairs of any rank use only one of several paths?
  bool keeps_to_path() const {
    return kind == WireKind::verbs && std::ranges::any_of(ranks, &WireFacts::keeps_to_path);
  }
};

/// Made collectively by all ranks of the bootstrap, including those that reach nobody by RDMA, in a step that they
/// agree on. Peers are reached in the whole heap; work requests address it by offsets. Signals may lie anywhere in it:
/// it is registered with strict ordering.
///
/// Destruction is not collective. It stops the thread of the `cpu` handler, and nothing of this rank touches a peer's
/// heap afterwards; so it must come before SymmetricHeap::unmap_peers(). Kernels that use the connections must have
/// ended. What they posted may still be under way and would be lost: see drain().
class Connections {
 public:
  /// One object for each set of queue pairs; they are connected together. Of a set with a rail_width all ranks agree
  /// whether it counts, by DEEP_EP_RAIL_ONLY and by trying (why_unreached()). InvalidArgument for options out of
  /// range, RankMismatch if the ranks do not fit together, SystemError if a NIC refuses; on every rank if it fails on
  /// one.
  static std::vector<std::unique_ptr<Connections>> make(Bootstrap& bootstrap, std::shared_ptr<Executor> executor,
                                                        std::shared_ptr<SymmetricHeap> heap,
                                                        std::span<const ConnectionOptions> sets, AgreedWire wire);
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  /// [channels][ranks] in memory that kernels of this rank read; the address stays the same for life. Entries of
  /// ranks that are not reached by RDMA have queue.depth == 0 and nothing else.
  const RdmaQueuePair* device_peers() const { return device_peers_.get(); }

  /// Throws SystemError for the first operation that failed, as far as the host sees it: the `cpu` handler sees all,
  /// the `gpu` handler those of rings in host memory (kernels put the others on record), and queue pairs of which
  /// the device says that they have failed.
  void check() const;

  /// One sentence for whoever waits in vain: what the NIC says of all that was posted. Empty where nobody is reached.
  /// No kernel may be posting.
  std::string health() const;

  /// Waits until all that kernels have posted has happened at the peers or has failed. Kernels that use the connections
  /// must have ended. False, and a warning, if it cannot be told or takes longer than the calls wait (`timeout_s`; 0:
  /// for ever), or 10 s, which is longer than a NIC takes to give up a peer that is gone (7 s, see PathOptions).
  bool drain(double timeout_s) const noexcept;

  /// Collective, while no kernel of any rank uses the connections: destroys all queue pairs and makes new ones. Failed
  /// ones work again; nothing is outstanding. Throws like make(); kernels must not use the connections then.
  void reconnect(Bootstrap& bootstrap);

  double bytes_per_ns() const { return wire_.bytes_per_ns; }  ///< see AgreedWire
  /// "7 peers x 3 channels, handler cpu, wire local".
  std::string describe() const;

 private:
  Connections(std::shared_ptr<Executor> executor, std::shared_ptr<SymmetricHeap> heap, ConnectionOptions options,
              AgreedWire wire);
  static void connect(Bootstrap& bootstrap, std::span<Connections* const> sets, const MakeEnds& make);

  std::shared_ptr<Executor> executor_;
  std::shared_ptr<SymmetricHeap> heap_;
  ConnectionOptions options_;
  AgreedWire wire_;
  std::shared_ptr<RdmaQueuePair> device_peers_;
  /// Of each NIC. None where there are no peers, or where new ones could not be made and the old ones are gone. Last:
  /// uses the rest.
  std::vector<std::unique_ptr<Ends>> ends_;
};

}  // namespace deep_ep::rdma
