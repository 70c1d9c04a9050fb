#include "csrc/rdma/connecting.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {
namespace {

/// The addresses of all ends of a set. End (channel, b) of rank a is connected to end (channel, a) of rank b, or where
/// that is on another rail of a fabric that connects rails only, to what receives there from a.
///
/// A bootstrap can only gather, so each rank hears what each other one tells all. Ends differ in numbers only: so that
/// is the address that the ends share, then of each rail that of its landings; and behind the addresses for each rank
/// the numbers of the queue pairs to it, by channel, then those of landings.
class AddressBook {
 public:
  /// Collective. `ends`: null where the set has no peers.
  AddressBook(Bootstrap& bootstrap, const ConnectionOptions& options, const Ends* ends)
      : options_(options), rank_(bootstrap.rank()) {
    std::vector<std::byte> mine(number_at(bootstrap.size(), 0, false));
    for (std::size_t end = 0; ends != nullptr && end < options.ends(); ++end) {
      const int peer = options.peer(end);
      const auto tell = [&](bool landing, const QueuePairAddress& address) {
        std::memcpy(mine.data() + address_at(peer, landing), &address, sizeof address);
        std::memcpy(mine.data() + number_at(peer, options.channel(end), landing), &address.queue_pair,
                    sizeof address.queue_pair);
      };
      tell(false, ends->address(end));
      if (options.lands(end)) tell(true, ends->landing(end));
    }
    bytes_of_rank_ = mine.size();
    told_ = bootstrap.all_gather(mine);
  }

  /// The other side of this end: an end of the peer, or that by which it receives on this rank's rail.
  QueuePairAddress other_side(std::size_t end) const { return find(options_.other(end), options_.lands(end)); }
  /// Returns what kernels need to reach the peer.
  RdmaPeerParams connect(Ends& ends, std::size_t end) const {
    const RdmaPeerParams params = ends.connect(end, other_side(end));
    if (options_.lands(end)) ends.connect_landing(end, find(end, false));
    return params;
  }

 private:
  /// Told by the peer of this end.
  QueuePairAddress find(std::size_t end, bool landing) const {
    const std::byte* const told = told_.data() + static_cast<std::size_t>(options_.peer(end)) * bytes_of_rank_;
    QueuePairAddress address;
    std::memcpy(static_cast<void*>(&address), told + address_at(rank_, landing), sizeof address);
    std::memcpy(&address.queue_pair, told + number_at(rank_, options_.channel(end), landing),
                sizeof address.queue_pair);
    return address;
  }

  /// In bytes, where a rank tells by which address `rank` reaches it.
  std::size_t address_at(int rank, bool landing) const {
    return (landing ? 1 + static_cast<std::size_t>(options_.rail_of(rank)) : 0) * sizeof(QueuePairAddress);
  }
  std::size_t number_at(int rank, int channel, bool landing) const {
    const int numbers = (options_.rail_width == 0 ? 1 : 2) * options_.channels;
    const int number = rank * numbers + (landing ? options_.channels : 0) + channel;
    return (1 + static_cast<std::size_t>(options_.rail_width)) * sizeof(QueuePairAddress) +
           static_cast<std::size_t>(number) * sizeof(QueuePairAddress::queue_pair);
  }

  const ConnectionOptions& options_;
  int rank_;
  std::vector<std::byte> told_;  ///< [ranks]
  std::size_t bytes_of_rank_ = 0;
};

}  // namespace

std::vector<ConnectedEnds> make_connected_ends(Bootstrap& bootstrap, std::span<const ConnectionOptions> sets,
                                               NicHandler wanted, bool may_fall_back, const MakeEnds& make) {
  std::vector<std::string> refusals;
  // All ranks make as many attempts, also those that insist on a handler.
  int attempt = static_cast<int>(may_fall_back ? NicHandler::gpu : NicHandler::cpu);
  for (;; ++attempt) {
    const auto open = static_cast<NicHandler>(attempt);
    const NicHandler handler = wanted == NicHandler::automatic ? open : wanted;
    const auto goes_well = [&](std::string_view what, const std::function<void()>& step) {
      if (open == NicHandler::cpu) return agree(bootstrap, what, step), true;
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
    if (!goes_well("making RDMA queue pairs", make_all)) continue;
    std::vector<AddressBook> books;
    for (std::size_t set = 0; set < sets.size(); ++set) {
      books.emplace_back(bootstrap, sets[set], made[set].ends.get());
    }
    const auto connect_all = [&] {
      for (std::size_t set = 0; set < sets.size(); ++set) {
        const ConnectionOptions& options = sets[set];
        made[set].peers.resize(static_cast<std::size_t>(options.channels * bootstrap.size()));
        if (made[set].ends == nullptr) continue;
        for (std::size_t end = 0; end < options.ends(); ++end) {
          const int place = options.channel(end) * bootstrap.size() + options.peer(end);
          made[set].peers[static_cast<std::size_t>(place)] = books[set].connect(*made[set].ends, end);
        }
        made[set].ends->start();
      }
    };
    if (!goes_well("connecting RDMA queue pairs", connect_all)) continue;
    const bool reaches = std::ranges::any_of(made, [](const ConnectedEnds& one) { return one.ends != nullptr; });
    if (wanted == NicHandler::automatic && reaches && !refusals.empty()) {
      log::warn("RDMA: a CPU thread {} (DEEP_EP_NIC_HANDLER={}), because: {}",
                handler == NicHandler::cpu ? "executes what kernels post" : "rings the NIC for kernels",
                name_of(handler), fmt::join(refusals, "; "));
    }
    return made;
  }
}

std::string why_unreached(Bootstrap& bootstrap, int width, bool by_landings, const MakeEnds& make) {
  const int rank = bootstrap.rank();
  const int size = bootstrap.size();
  const int first = rank / width * width;  // of this node
  ConnectionOptions options{.rank = rank, .depth = 64, .rail_width = by_landings ? width : 0, .hasty = true};
  for (const int node : std::set{(first + width) % size, (first + size - width) % size}) {  // one, of two nodes
    for (int peer = node; peer < node + width; ++peer) {
      if (peer % width != rank % width) options.peers.push_back(peer);
    }
  }
  std::unique_ptr<Ends> ends;
  agree(bootstrap, "making queue pairs that try other rails", [&] { ends = make(NicHandler::cpu, options); });
  const AddressBook addresses(bootstrap, options, ends.get());
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
                            name(options.peer(end), addresses.other_side(end)), error.what());
        }
      }
    });
  };
  std::vector<RdmaPeerParams> peers(options.ends());
  auto failure = try_all([&](std::size_t end) { peers[end] = addresses.connect(*ends, end); });
  // The queue pairs stay until all ranks have sent.
  if (!failure) failure = try_all([&](std::size_t end) { ends->reach(end, peers[end]); });
  return failure ? failure->why : std::string();
}

}  // namespace deep_ep::rdma
