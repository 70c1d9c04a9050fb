#include "csrc/rdma/connections.hpp"

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/executor/own_stream.hpp"
#include "csrc/memory/executor_memory.hpp"
#include "csrc/rdma/local/local_ends.hpp"
#include "csrc/rdma/rails.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "csrc/rdma/verbs/nic_rails.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "simulation/simulated_ends.hpp"

namespace deep_ep::rdma {
namespace {

/// Once in this process.
void log_map(const NicMap& map, const RdmaSettings& settings) {
  static std::atomic_flag is_logged;
  if (is_logged.test_and_set()) return;
  if (!settings.taken.empty()) log::info("rdma: in effect: {}", fmt::join(settings.taken, ", "));
  for (std::size_t gpu = 0; gpu < map.rows.size(); ++gpu) log::info("rdma: {}", map.line(gpu));
  for (const std::string& nic : map.unused) log::info("rdma: not used: {}", nic);
  for (const std::string& warning : map.warnings) log::warn("rdma: {}", warning);
}

/// None, and `why_not`, if this rank has no NIC that can be used.
std::vector<NicAssignment> find_nics_of(std::span<const ProcessIdentity> processes, int rank,
                                        const deep_ep::Device& device, const RdmaSettings& settings,
                                        std::string& why_not) {
  const auto& mine = processes[static_cast<std::size_t>(rank)];
  const auto on_this_host = [&](const ProcessIdentity& process) { return process.same_host(mine); };
  const auto local_rank = std::count_if(processes.begin(), processes.begin() + rank, on_this_host);
  const auto local_ranks = std::count_if(processes.begin(), processes.end(), on_this_host);
  const bool cuda = device.kind == deep_ep::Device::Kind::cuda;
  const NicMap map = map_gpus_to_nics(cuda ? topology::find_gpus({}) : ranks_without_gpu(static_cast<int>(local_ranks)),
                                      find_nics({}), settings);
  log_map(map, settings);
  try {
    std::vector<NicAssignment> nics =
        cuda ? nics_of_cuda_device(map, device.index) : nics_of(map, static_cast<std::size_t>(local_rank));
    verbs::verbs_functions();  // refuses where libibverbs cannot be used
    return nics;
  } catch (const SystemError& error) {
    why_not = error.what();
    return {};
  }
}

/// The addresses of all ends. End (channel, b) of rank a is connected to end (channel, a) of rank b, or where that is
/// on another rail of a fabric that connects rails only, to what receives there from a.
///
/// A bootstrap can only gather, so each rank hears what each other one tells all. Ends of a set differ in numbers only:
/// so that is, of each set, the address that its ends share, then of each rail that of its landings; and behind the
/// addresses for each rank the numbers of the queue pairs to it, by channel, then those of landings.
class AddressBook {
 public:
  /// Collective.
  AddressBook(Bootstrap& bootstrap, std::span<const ConnectionOptions> sets, std::span<const ConnectedEnds> made)
      : sets_(sets), rank_(bootstrap.rank()) {
    for (const ConnectionOptions& set : sets) {
      firsts_.push_back({addresses_, numbers_});
      addresses_ += 1 + static_cast<std::size_t>(set.rail_width);
      numbers_ += static_cast<std::size_t>((set.rail_width == 0 ? 1 : 2) * set.channels);
    }
    std::vector<std::byte> mine(number_at(bootstrap.size(), 0));
    for (std::size_t set = 0; set < sets.size(); ++set) {
      for (std::size_t end = 0; made[set].ends != nullptr && end < sets[set].ends(); ++end) {
        const int peer = sets[set].peer(end);
        const auto tell = [&](std::optional<int> landing_rail, const QueuePairAddress& address) {
          const Place at = place(set, end, landing_rail);
          std::memcpy(mine.data() + at.address * sizeof address, &address, sizeof address);
          std::memcpy(mine.data() + number_at(peer, at.number), &address.queue_pair, sizeof address.queue_pair);
        };
        tell({}, made[set].ends->address(end));
        if (sets[set].lands(end)) tell(sets[set].rail_of(peer), made[set].ends->landing(end));
      }
    }
    bytes_of_rank_ = mine.size();
    told_ = bootstrap.all_gather(mine);
  }

  /// The address that the peer of this end has told: its own, or that by which it receives on a rail.
  QueuePairAddress find(std::size_t set, std::size_t end, std::optional<int> landing_rail) const {
    const Place at = place(set, end, landing_rail);
    const std::byte* const told = told_.data() + static_cast<std::size_t>(sets_[set].peer(end)) * bytes_of_rank_;
    QueuePairAddress address;
    std::memcpy(static_cast<void*>(&address), told + at.address * sizeof address, sizeof address);
    std::memcpy(&address.queue_pair, told + number_at(rank_, at.number), sizeof address.queue_pair);
    return address;
  }

 private:
  /// Among the addresses, and among the numbers of the queue pairs to one rank.
  struct Place {
    std::size_t address = 0, number = 0;
  };

  Place place(std::size_t set, std::size_t end, std::optional<int> landing_rail) const {
    const auto channel = static_cast<std::size_t>(sets_[set].channel(end));
    const Place& first = firsts_[set];
    if (!landing_rail) return {first.address, first.number + channel};
    return {first.address + 1 + static_cast<std::size_t>(*landing_rail),
            first.number + static_cast<std::size_t>(sets_[set].channels) + channel};
  }
  /// In bytes, where a number of a queue pair to `rank` lies in what a rank tells.
  std::size_t number_at(int rank, std::size_t number) const {
    return addresses_ * sizeof(QueuePairAddress) +
           (static_cast<std::size_t>(rank) * numbers_ + number) * sizeof(QueuePairAddress::queue_pair);
  }

  std::span<const ConnectionOptions> sets_;
  int rank_;
  std::vector<Place> firsts_;  ///< of each set
  std::size_t addresses_ = 0, numbers_ = 0;
  std::vector<std::byte> told_;  ///< [ranks]
  std::size_t bytes_of_rank_ = 0;
};

/// Fills in what kernels need to reach the peers.
void connect_ends(const ConnectionOptions& options, std::size_t set, const AddressBook& addresses, int num_ranks,
                  ConnectedEnds& made) {
  made.peers.resize(static_cast<std::size_t>(options.channels * num_ranks));
  if (made.ends == nullptr) return;
  for (std::size_t end = 0; end < options.ends(); ++end) {
    const bool lands = options.lands(end);
    const auto rail = lands ? std::optional(options.rail_of(options.rank)) : std::nullopt;
    made.peers[static_cast<std::size_t>(options.channel(end) * num_ranks + options.peer(end))] =
        made.ends->connect(end, addresses.find(set, options.other(end), rail));
    if (lands) made.ends->connect_landing(end, addresses.find(set, end, {}));
  }
  made.ends->start();
}

}  // namespace

WireKind choose_wire(std::span<const WireFacts> ranks, std::string& why_local) {
  const WireKind wanted = ranks[0].wanted.kind;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].wanted.kind != wanted) {
      fail<RankMismatch>("DEEP_EP_RDMA_WIRE is {} on rank 0 but {} on rank {}; it must be equal on all ranks",
                         name_of(wanted), name_of(ranks[rank].wanted.kind), rank);
    }
    if (ranks[rank].wanted.nic != ranks[0].wanted.nic) {
      fail<RankMismatch>("DEEP_EP_RDMA_WIRE is simulated with other keys on rank 0 than on rank {}; they must be equal",
                         rank);
    }
    if (ranks[rank].rail_only != ranks[0].rail_only) {
      fail<RankMismatch>("DEEP_EP_RAIL_ONLY is {} on rank 0 but {} on rank {}; it must be equal on all ranks",
                         name_of(ranks[0].rail_only), name_of(ranks[rank].rail_only), rank);
    }
  }
  // Of those that need RDMA.
  const auto first = [&](const auto& is_one) {
    return std::ranges::find_if(ranks, [&](const WireFacts& rank) { return rank.needs_rdma && is_one(rank); });
  };
  const auto any = first([](const WireFacts&) { return true; });
  if (any == ranks.end()) return WireKind::local;
  const auto elsewhere = first([&](const WireFacts& rank) { return !rank.process.same_host(any->process); });
  const auto without_nic = first([](const WireFacts& rank) { return rank.why_no_nic[0] != '\0'; });
  // A handler that was asked for, and has nothing to ring without a NIC.
  const auto rings_nic = first(
      [](const WireFacts& rank) { return rank.handler == NicHandler::gpu || rank.handler == NicHandler::doorbell; });
  if (wanted == WireKind::local || wanted == WireKind::simulated) {
    if (elsewhere != ranks.end()) {
      fail<SystemError>(
          "DEEP_EP_RDMA_WIRE={} is impossible: rank {} (host {}) and rank {} (host {}) are not on one host",
          name_of(wanted), any - ranks.begin(), any->process.host.data(), elsewhere - ranks.begin(),
          elsewhere->process.host.data());
    }
    if (wanted == WireKind::local && rings_nic != ranks.end()) {
      fail<SystemError>("DEEP_EP_NIC_HANDLER={} is impossible with DEEP_EP_RDMA_WIRE=local: no NIC",
                        name_of(rings_nic->handler));
    }
    const auto by_thread = first([](const WireFacts& rank) { return rank.handler == NicHandler::cpu; });
    if (wanted == WireKind::simulated && by_thread != ranks.end()) {
      throw SystemError("DEEP_EP_NIC_HANDLER=cpu is impossible with DEEP_EP_RDMA_WIRE=simulated: kernels ring it");
    }
    return wanted;
  }
  if (without_nic == ranks.end()) return WireKind::verbs;
  const std::string_view host = without_nic->process.host.data(), why = without_nic->why_no_nic.data();
  if (wanted != WireKind::automatic || elsewhere != ranks.end() || rings_nic != ranks.end()) {
    fail<SystemError>("rank {} (host {}): {}", without_nic - ranks.begin(), host, why);
  }
  why_local = fmt::format("rank {} (host {}): {}", without_nic - ranks.begin(), host, why);
  return WireKind::local;
}

AgreedWire AgreedWire::agree(Bootstrap& bootstrap, const Executor& executor, bool needs_rdma,
                             std::span<const ProcessIdentity> processes, std::optional<RdmaSettings> settings) {
  AgreedWire wire;
  WireFacts mine;
  mine.process = processes[static_cast<std::size_t>(bootstrap.rank())];
  mine.needs_rdma = needs_rdma;
  deep_ep::agree(bootstrap, "reading the RDMA settings", [&] {
    wire.settings = settings ? *std::move(settings) : read_settings();
    mine.wanted = wire.settings.wire;
    mine.handler = wire.settings.nic_handler;
    mine.rail_only = wire.settings.rail_only;
    const WireKind wanted = mine.wanted.kind;
    if (!needs_rdma || wanted == WireKind::local || wanted == WireKind::simulated) return;
    std::string why_not;
    wire.nics = find_nics_of(processes, bootstrap.rank(), executor.device(), wire.settings, why_not);
    why_not.copy(mine.why_no_nic.data(), mine.why_no_nic.size() - 1);
    if (wire.nics.empty()) return;
    wire.nics[0].nic.name.copy(mine.nic.data(), mine.nic.size() - 1);
    mine.path = verbs::path_by(wire.settings, wire.nics[0]);
    mine.num_nics = static_cast<int>(wire.nics.size());
    mine.keeps_to_path = rdma::keeps_to_path(wire.nics);
    for (const NicAssignment& nic : wire.nics) mine.bytes_per_ns += nic.of_port().rate_gbps / 8;
  });
  std::string why_local;
  wire.ranks = all_gather_values(bootstrap, mine);
  wire.kind = choose_wire(wire.ranks, why_local);
  std::optional<int> least;
  double slowest = 0;
  for (const WireFacts& rank : wire.ranks) {
    if (rank.needs_rdma) least = std::min(least.value_or(rank.num_nics), rank.num_nics);
    if (rank.bytes_per_ns > 0 && (slowest == 0 || rank.bytes_per_ns < slowest)) slowest = rank.bytes_per_ns;
  }
  if (wire.kind == WireKind::verbs) wire.num_nics = least.value_or(1);
  if (slowest != 0) wire.bytes_per_ns = slowest;
  wire.handler = wire.settings.nic_handler;
  if (wire.kind == WireKind::simulated && wire.handler != NicHandler::doorbell) wire.handler = NicHandler::gpu;
  // For the wire `local`, and for kernels on the CPU, there is no other.
  const bool cuda = executor.device().kind == deep_ep::Device::Kind::cuda;
  const bool only_cpu = wire.kind == WireKind::local || (wire.kind == WireKind::verbs && !cuda);
  if (only_cpu && wire.handler == NicHandler::automatic) wire.handler = NicHandler::cpu;
  if (!why_local.empty() && bootstrap.rank() == 0) {
    // On GPUs that is slow, and hardly what their owner wants.
    log::at(cuda ? log::Level::warn : log::Level::info,
            "rdma: a CPU thread of each rank copies what would be sent (wire local), because: {}", why_local);
  }
  return wire;
}

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
    const AddressBook addresses(bootstrap, sets, made);
    const auto connect_all = [&] {
      for (std::size_t set = 0; set < sets.size(); ++set) {
        connect_ends(sets[set], set, addresses, bootstrap.size(), made[set]);
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

namespace {

[[noreturn]] void fail_without_path(const AgreedWire& wire, const std::string& over_rails) {
  fail<SystemError>(
      "low-latency calls have no path between rails. Directly: {}. Over rails, where NICs of a node receive for each "
      "other: {}. A buffer without low_latency.bytes needs no such path",
      wire.why_rails_only.empty() ? "not tried, as DEEP_EP_RAIL_ONLY is 1" : wire.why_rails_only, over_rails);
}

/// Collective. Makes each NIC of the node receive for this rank, and tries it.
void open_rails(Bootstrap& bootstrap, const Executor& executor, const SymmetricHeap& heap, int width,
                AgreedWire& wire) {
  const int rank = bootstrap.rank();
  const auto failure = first_failure(bootstrap, [&] {
    const auto ranks =
        std::span(wire.ranks).subspan(static_cast<std::size_t>(rank / width * width), static_cast<std::size_t>(width));
    wire.landing_nics = std::make_shared<const verbs::LandingNics>(
        verbs::open_landing_nics(verbs::access_of(wire.nics.at(0), executor, wire.settings),
                                 static_cast<std::size_t>(rank % width), ranks, heap));
  });
  if (failure) {
    fail_without_path(wire, fmt::format("rank {} (rail {}, NIC {}): {}", failure->rank, failure->rank % width,
                                        wire.ranks[static_cast<std::size_t>(failure->rank)].nic.data(), failure->why));
  }
  const std::string unreached = why_unreached(bootstrap, width, [&](std::size_t count) {
    return verbs::make_nic_paths(wire.ranks[static_cast<std::size_t>(rank)], count, *wire.landing_nics);
  });
  if (!unreached.empty()) fail_without_path(wire, unreached);
}

/// Collective. Clears the rail_width of sets whose peers are all reached at their own NICs.
void keep_to_rails(Bootstrap& bootstrap, const Executor& executor, const SymmetricHeap& heap,
                   std::span<ConnectionOptions> sets, AgreedWire& wire) {
  const auto found = std::ranges::find_if(sets, [](const ConnectionOptions& set) { return set.rail_width > 1; });
  const int width = found == sets.end() ? 0 : found->rail_width;
  Choice rail_only = width == 0 ? Choice::no : wire.settings.rail_only;
  if (rail_only == Choice::automatic && wire.kind != WireKind::local) {
    wire.why_rails_only = why_unreached(bootstrap, width, [&](std::size_t count) {
      if (wire.kind == WireKind::simulated) return make_simulated_paths(bootstrap.rank(), wire.settings.wire.nic);
      return verbs::make_nic_paths(wire.ranks[static_cast<std::size_t>(bootstrap.rank())], count);
    });
    if (!wire.why_rails_only.empty()) rail_only = Choice::yes;
  }
  if (rail_only != Choice::yes) {
    for (ConnectionOptions& set : sets) set.rail_width = 0;
    return;
  }
  if (wire.kind == WireKind::verbs) open_rails(bootstrap, executor, heap, width, wire);
  if (bootstrap.rank() == 0) {
    log::info(
        "rdma: low-latency calls keep to {} rails (DEEP_EP_RAIL_ONLY={}), NICs of a node receive for each other{}{}",
        width, name_of(wire.settings.rail_only), wire.why_rails_only.empty() ? "" : ", because ", wire.why_rails_only);
  }
}

}  // namespace

Connections::Connections(std::shared_ptr<Executor> executor, std::shared_ptr<SymmetricHeap> heap,
                         ConnectionOptions options, AgreedWire wire)
    : executor_(std::move(executor)), heap_(std::move(heap)), options_(std::move(options)), wire_(std::move(wire)) {}

std::vector<std::unique_ptr<Connections>> Connections::make(Bootstrap& bootstrap, std::shared_ptr<Executor> executor,
                                                            std::shared_ptr<SymmetricHeap> heap,
                                                            std::span<const ConnectionOptions> sets, AgreedWire wire) {
  std::vector<ConnectionOptions> filled(sets.begin(), sets.end());
  for (ConnectionOptions& options : filled) options.rank = bootstrap.rank();
  keep_to_rails(bootstrap, *executor, *heap, filled, wire);
  std::vector<std::unique_ptr<Connections>> made;
  std::vector<Connections*> all;
  for (ConnectionOptions& options : filled) {
    // What keeps to rails has one NIC, as other ranks receive by it.
    options.num_nics = options.rail_width != 0 ? 1 : std::min(wire.num_nics, options.channels);
    made.emplace_back(new Connections(executor, heap, options, wire));
    all.push_back(made.back().get());
  }
  connect(bootstrap, all);
  return made;
}

Connections::~Connections() = default;

void Connections::connect(Bootstrap& bootstrap, std::span<Connections* const> sets) {
  Connections& any = *sets.front();
  any.executor_->make_current();
  const AgreedWire& wire = any.wire_;
  std::map<int, verbs::NicAccess> opened;  // by ConnectionOptions::nic
  const auto make_ends = [&](NicHandler handler, const ConnectionOptions& options) {
    if (wire.kind == WireKind::local) return make_local_ends(any.executor_, *any.heap_, options);
    if (wire.kind == WireKind::simulated) {
      return make_simulated_ends(any.executor_, *any.heap_, options, wire.settings.wire.nic, handler);
    }
    if (!opened.contains(options.nic)) {
      const NicAssignment& nic = wire.nics.at(static_cast<std::size_t>(options.nic));
      opened[options.nic] = verbs::open_nic(nic, *any.executor_, wire.settings, *any.heap_);
      opened[options.nic].landing_nics = wire.landing_nics;
    }
    return verbs::make_nic_ends(handler, opened[options.nic], any.executor_, options);
  };
  std::vector<ConnectionOptions> parts;  // of each set, by NIC
  for (const Connections* one : sets) {
    for (int nic = 0; nic < one->options_.num_nics; ++nic) parts.emplace_back(one->options_).nic = nic;
  }
  std::vector<ConnectedEnds> connected =
      make_connected_ends(bootstrap, parts, wire.handler, wire.kind == WireKind::verbs, make_ends);
  agree(bootstrap, "copying the table of RDMA connections", [&] {
    const OwnStream stream(*any.executor_);
    auto part = connected.begin();
    for (Connections* const set : sets) {
      std::vector<RdmaPeerParams> peers = part->peers;
      for (int nic = 0; nic < set->options_.num_nics; ++nic, ++part) {
        for (std::size_t place = 0; place < peers.size(); ++place) {
          if (part->peers[place].queue.depth != 0) peers[place] = part->peers[place];
        }
        if (part->ends != nullptr) set->ends_.push_back(std::move(part->ends));
      }
      const std::size_t bytes = peers.size() * sizeof(RdmaPeerParams);
      if (set->device_peers_ == nullptr) set->device_peers_ = device_memory<RdmaPeerParams>(any.executor_, bytes);
      any.executor_->copy(set->device_peers_.get(), peers.data(), bytes, stream.get());
      any.executor_->synchronize(stream.get());
    }
  });
  for (Connections* const set : sets) {
    set->connected_ = true;
    log::info("rdma: rank {}: {}", bootstrap.rank(), set->describe());
  }
}

void Connections::reconnect(Bootstrap& bootstrap) {
  connected_ = false;
  ends_.clear();
  connect(bootstrap, std::array{this});
  bootstrap.barrier();  // where it has failed on a rank, it fails on all
}

void Connections::check() const {
  if (!connected_) throw SystemError("the RDMA connections are gone: making new ones has failed");
  for (const auto& ends : ends_) {
    if (const std::optional<Failure> seen = ends->failure()) throw SystemError(rdma::describe(*seen));
  }
}

std::string Connections::health() const {
  std::vector<std::string> of_nics;
  for (const auto& ends : ends_) {
    try {
      of_nics.push_back(fmt::format("RDMA ({}): {}", ends->describe(), ends->health()));
    } catch (const std::exception& error) {
      of_nics.push_back(fmt::format("RDMA ({}) does not say how it is: {}", ends->describe(), error.what()));
    }
  }
  return fmt::format("{}", fmt::join(of_nics, "; "));
}

bool Connections::drain(double timeout_s) const noexcept {
  try {
    executor_->make_current();
    const Deadline deadline(timeout_s == 0 ? 10 : std::min(timeout_s, 10.0));
    while (!std::ranges::all_of(ends_, [](const auto& ends) { return ends->idle(); })) {
      if (deadline.expired()) {
        log::warn("rdma: what was posted has not arrived within {} s and is given up", deadline.seconds());
        return false;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
  } catch (const std::exception& error) {
    log::warn("rdma: whether all that was posted has arrived cannot be told: {}", error.what());
    return false;
  }
}

std::string Connections::describe() const {
  std::vector<std::string> of_nics;
  for (const auto& ends : ends_) of_nics.push_back(ends->describe());
  return fmt::format("{} {} x {} {}, {}{}", options_.peers.size(), options_.peers.size() == 1 ? "peer" : "peers",
                     options_.channels, options_.channels == 1 ? "channel" : "channels",
                     options_.rail_width != 0 ? "rails only, " : "",
                     !connected_     ? "gone"
                     : ends_.empty() ? "no NIC needed"
                                     : fmt::format("{}", fmt::join(of_nics, " and ")));
}

}  // namespace deep_ep::rdma
