#include "csrc/rdma/connecting.hpp"

#include <algorithm>
#include <array>
#include <exception>
#include <span>
#include <string>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/rdma/queue_pair_address.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {
namespace {

/// How connecting went on one rank; all-gathered.
struct Outcome {
  bool failed = false;
  bool may_fall_back = false;
  std::array<char, 400> why{};
};

std::vector<QueuePairAddress> exchange(Bootstrap& bootstrap, const ConnectionOptions& options, const Ends* ends) {
  std::vector<QueuePairAddress> mine(
      ends == nullptr ? 0 : options.peers.size() * static_cast<std::size_t>(options.channels));
  for (std::size_t end = 0; end < mine.size(); ++end) mine[end] = ends->address(end);
  return exchange_addresses(bootstrap, options.channels, options.peers, mine);
}

void connect(const ConnectionOptions& options, int num_ranks, std::span<const QueuePairAddress> theirs,
             ConnectedEnds& connected) {
  if (connected.ends == nullptr) return;
  std::size_t end = 0;
  for (int channel = 0; channel < options.channels; ++channel) {
    for (const int peer : options.peers) {
      connected.peers[static_cast<std::size_t>(channel * num_ranks + peer)] = connected.ends->connect(end, theirs[end]);
      ++end;
    }
  }
  connected.ends->start();
}

}  // namespace

ConnectedEnds make_connected_ends(Bootstrap& bootstrap, const ConnectionOptions& options, NicHandler wanted,
                                  bool may_fall_back, const MakeEnds& make) {
  for (NicHandler handler = wanted;;) {
    ConnectedEnds connected;
    connected.peers.resize(static_cast<std::size_t>(options.channels * bootstrap.size()));
    agree(bootstrap, "making RDMA queue pairs", [&] { connected.ends = make(handler); });
    const auto theirs = exchange(bootstrap, options, connected.ends.get());
    if (!may_fall_back) {
      agree(bootstrap, "connecting RDMA queue pairs", [&] { connect(options, bootstrap.size(), theirs, connected); });
      return connected;
    }
    Outcome mine;
    std::exception_ptr thrown;
    try {
      connect(options, bootstrap.size(), theirs, connected);
    } catch (const std::exception& error) {
      thrown = std::current_exception();
      mine.failed = true;
      mine.may_fall_back = handler == NicHandler::automatic && connected.ends->rung_by_kernels() &&
                           dynamic_cast<const SystemError*>(&error) != nullptr;
      std::string(error.what()).copy(mine.why.data(), mine.why.size() - 1);
    }
    const std::vector<Outcome> all = all_gather_values(bootstrap, mine);
    const auto failed = std::find_if(all.begin(), all.end(), [](const Outcome& rank) { return rank.failed; });
    if (failed == all.end()) return connected;
    if (std::ranges::any_of(all, [](const Outcome& rank) { return rank.failed && !rank.may_fall_back; })) {
      if (thrown) std::rethrow_exception(thrown);
      fail<SystemError>("connecting RDMA queue pairs failed on rank {}: {}", failed - all.begin(), failed->why.data());
    }
    if (handler != NicHandler::automatic) continue;
    handler = NicHandler::cpu;
    if (connected.ends == nullptr) continue;
    log::warn("RDMA: a CPU thread executes what kernels post (DEEP_EP_NIC_HANDLER=cpu), because on rank {}: {}",
              failed - all.begin(), failed->why.data());
  }
}

}  // namespace deep_ep::rdma
