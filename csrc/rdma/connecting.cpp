#include "csrc/rdma/connecting.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep::rdma {
namespace {

/// The other side of an end. End (channel, b) of rank a writes to end (channel, a) of rank b, or where that is on
/// another rail of a fabric that connects rails only, to what receives there from a.
struct OtherSide {
  QueuePairAddress receiver;  ///< what the end writes to: an end of the peer, or its landing on this rank's rail
  QueuePairAddress sender;    ///< the peer's end that writes to this end's landing, where there is one

  RdmaQueuePair connect(Ends& ends, const ConnectionOptions& options, std::size_t end) const {
    const RdmaQueuePair params = ends.connect(end, receiver);
    if (options.lands(end)) ends.connect_landing(end, sender);
    return params;
  }
};

/// Collective. Of each end. `ends`: null where the set has no peers.
///
/// A bootstrap can only gather, so each rank hears what each other one tells all. Ends differ in numbers only: so that
/// is the address that the ends share, then of each rail that of its landings; and behind the addresses for each rank
/// the numbers of the queue pairs to it, by channel, then those of landings.
std::vector<OtherSide> find_other_sides(Bootstrap& bootstrap, const ConnectionOptions& options, const Ends* ends) {
  const int addresses = 1 + options.rail_width;
  const int numbers = (options.rail_width == 0 ? 1 : 2) * options.channels;  // for each rank
  // The place in which a rank tells by which address `to` reaches it.
  const auto places = [&](std::byte* told, int to, int channel, bool landing) {
    auto* const shared = reinterpret_cast<QueuePairAddress*>(told);
    auto* const number = reinterpret_cast<std::uint32_t*>(shared + addresses) + to * numbers;
    return std::pair(shared + (landing ? 1 + options.rail_of(to) : 0),
                     number + (landing ? options.channels : 0) + channel);
  };
  std::vector<std::byte> mine(static_cast<std::size_t>(addresses) * sizeof(QueuePairAddress) +
                              static_cast<std::size_t>(bootstrap.size() * numbers) * sizeof(std::uint32_t));
  const std::size_t count = ends == nullptr ? 0 : options.ends();
  for (std::size_t end = 0; end < count; ++end) {
    for (int landing = 0; landing <= (options.lands(end) ? 1 : 0); ++landing) {
      const auto [shared, number] = places(mine.data(), options.peer(end), options.channel(end), landing != 0);
      *shared = landing != 0 ? ends->landing(end) : ends->address(end);
      *number = shared->queue_pair;
    }
  }
  std::vector<std::byte> told = bootstrap.all_gather(mine);
  const auto find = [&](std::size_t end, bool landing) {
    std::byte* const of_peer = told.data() + static_cast<std::size_t>(options.peer(end)) * mine.size();
    const auto [shared, number] = places(of_peer, bootstrap.rank(), options.channel(end), landing);
    QueuePairAddress address = *shared;
    address.queue_pair = *number;
    return address;
  };
  std::vector<OtherSide> others;
  for (std::size_t end = 0; end < count; ++end) {
    others.push_back({find(options.other(end), options.lands(end)), find(end, false)});
  }
  return others;
}

}  // namespace

std::vector<ConnectedEnds> make_connected_ends(Bootstrap& bootstrap, std::span<const ConnectionOptions> sets,
                                               NicHandler wanted, bool may_fall_back, const MakeEnds& make) {
  std::vector<std::string> refusals;
  // All ranks make as many attempts, also those that insist on a handler.
  int attempt = static_cast<int>(may_fall_back ? NicHandler::gpu : NicHandler::cpu);
  for (;; ++attempt) {
    const auto open = static_cast<NicHandler>(attempt);
    const NicHandler handler = wanted == NicHandler::automatic ? open : wanted;
    const auto goes_well = [&](const std::function<void()>& step) {
      if (open == NicHandler::cpu) return step(), true;
      const auto failure = first_failure(bootstrap, step);
      if (failure) refusals.push_back(fmt::format("rank {}: {}", failure->rank, failure->why));
      return !failure;
    };
    std::vector<ConnectedEnds> made(sets.size());
    const auto make_all = [&] {
      for (std::size_t set = 0; set < sets.size(); ++set) {
        if (!sets[set].peers.empty()) made[set].ends = make(handler, sets[set]);
      }
    };
    if (!goes_well(make_all)) continue;
    std::vector<std::vector<OtherSide>> others;
    for (std::size_t set = 0; set < sets.size(); ++set) {
      others.push_back(find_other_sides(bootstrap, sets[set], made[set].ends.get()));
    }
    const auto connect_all = [&] {
      for (std::size_t set = 0; set < sets.size(); ++set) {
        if (made[set].ends == nullptr) continue;
        for (std::size_t end = 0; end < sets[set].ends(); ++end) {
          made[set].params.push_back(others[set][end].connect(*made[set].ends, sets[set], end));
        }
        made[set].ends->start();
      }
    };
    if (!goes_well(connect_all)) continue;
    const bool reaches = std::ranges::any_of(made, [](const ConnectedEnds& one) { return one.ends != nullptr; });
    if (wanted == NicHandler::automatic && reaches && !refusals.empty()) {
      log::warn("RDMA: a CPU thread {} (DEEP_EP_NIC_HANDLER={}), because: {}",
                handler == NicHandler::cpu ? "executes what kernels post" : "rings the NIC for kernels",
                name_of(handler), fmt::join(refusals, "; "));
    }
    return made;
  }
}

std::string why_unreached(Bootstrap& bootstrap, int width, bool by_landings, std::uint64_t sink, const MakeEnds& make) {
  const int rank = bootstrap.rank();
  const int size = bootstrap.size();
  const int first = rank / width * width;  // of this node
  ConnectionOptions options{
      .rank = rank, .depth = 64, .sink = sink, .rail_width = by_landings ? width : 0, .hasty = true};
  for (const int node : std::set{(first + width) % size, (first + size - width) % size}) {  // one, of two nodes
    for (int peer = node; peer < node + width; ++peer) {
      if (peer % width != rank % width) options.peers.push_back(peer);
    }
  }
  std::unique_ptr<Ends> ends;
  if (const auto failure = first_failure(bootstrap, [&] { ends = make(NicHandler::cpu, options); })) {
    // All ranks have the same failure: to try is possible or the error of all.
    if (!by_landings) {
      fail<SystemError>("making queue pairs that try other rails failed on rank {}: {}", failure->rank, failure->why);
    }
    return fmt::format("rank {} (rail {}): {}", failure->rank, failure->rank % width, failure->why);
  }
  const std::vector<OtherSide> others = find_other_sides(bootstrap, options, ends.get());
  const auto name = [&](int of, const QueuePairAddress& at) {
    return fmt::format("rank {} (rail {}, GID {} LID {})", of, of % width, GidEntry{.bytes = at.gid}.address(), at.lid);
  };
  const auto try_all = [&](const auto& step) {
    return first_failure(bootstrap, [&] {
      for (std::size_t end = 0; end < options.ends(); ++end) {
        try {
          step(end);
        } catch (const Error& error) {
          fail<SystemError>("{} does not reach {}: {}", name(rank, ends->address(end)),
                            name(options.peer(end), others[end].receiver), error.what());
        }
      }
    });
  };
  auto failure = try_all([&](std::size_t end) { others[end].connect(*ends, options, end); });
  // The queue pairs stay until all ranks have sent.
  if (!failure) failure = try_all([&](std::size_t end) { ends->reach(end, others[end].receiver); });
  return failure ? failure->why : std::string();
}

}  // namespace deep_ep::rdma
