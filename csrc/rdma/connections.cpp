#include "csrc/rdma/connections.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/executor/own_stream.hpp"
#include "csrc/memory/executor_memory.hpp"
#include "csrc/rdma/local/local_ends.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "csrc/rdma/verbs/libraries.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "simulation/simulated_ends.hpp"

namespace deep_ep::rdma {
namespace {

void check_options(const ConnectionOptions& options, int rank, int num_ranks) {
  if (options.channels < 1 || options.channels > 64) {
    fail<InvalidArgument>("RDMA connections: {} channels, allowed: 1 to 64", options.channels);
  }
  check_ring(options.depth, options.batch);
  std::vector<bool> named(static_cast<std::size_t>(num_ranks));
  for (const int peer : options.peers) {
    if (peer < 0 || peer >= num_ranks || peer == rank) {
      fail<InvalidArgument>("RDMA connections of rank {}: peer {}, allowed: 0 to {} without this rank", rank, peer,
                            num_ranks - 1);
    }
    if (named[static_cast<std::size_t>(peer)]) {
      fail<InvalidArgument>("RDMA connections of rank {}: peer {} is named twice", rank, peer);
    }
    named[static_cast<std::size_t>(peer)] = true;
  }
}

/// Nothing, and `why_not`, if this rank has no NIC that can be used.
std::optional<NicAssignment> find_nic(std::span<const ProcessIdentity> processes, int rank,
                                      const deep_ep::Device& device, std::string& why_not) {
  const auto& mine = processes[static_cast<std::size_t>(rank)];
  const auto on_this_host = [&](const ProcessIdentity& process) { return process.same_host(mine); };
  const auto local_rank = std::count_if(processes.begin(), processes.begin() + rank, on_this_host);
  const auto local_ranks = std::count_if(processes.begin(), processes.end(), on_this_host);
  try {
    const NicAssignment nic = device.kind == deep_ep::Device::Kind::cuda
                                  ? nic_of_cuda_device(device.index)
                                  : nic_of_host_rank(static_cast<int>(local_rank), static_cast<int>(local_ranks));
    verbs::require_libraries();
    return nic;
  } catch (const SystemError& error) {
    why_not = error.what();
    return std::nullopt;
  }
}

/// How connecting went on one rank; all-gathered.
struct Outcome {
  bool failed = false;
  bool may_fall_back = false;
  std::array<char, 400> why{};
};

/// Of each set the addresses of the ends at the other sides: end (channel, b) of rank a is connected to end (channel,
/// a) of rank b. A rank says of each set what its ends have in common, and their numbers: [channels][ranks].
std::vector<std::vector<QueuePairAddress>> exchange_addresses(Bootstrap& bootstrap,
                                                              std::span<const ConnectionOptions> sets,
                                                              std::span<const ConnectedEnds> made) {
  const auto ranks = static_cast<std::size_t>(bootstrap.size());
  std::vector<QueuePairAddress> common(sets.size());
  std::vector<std::uint32_t> numbers;
  for (std::size_t set = 0; set < sets.size(); ++set) {
    const std::size_t first = numbers.size();
    numbers.resize(first + static_cast<std::size_t>(sets[set].channels) * ranks);
    for (std::size_t end = 0; made[set].ends != nullptr && end < sets[set].ends(); ++end) {
      common[set] = made[set].ends->address(end);
      const auto place = static_cast<std::size_t>(sets[set].channel(end)) * ranks;
      numbers[first + place + static_cast<std::size_t>(sets[set].peer(end))] = common[set].queue_pair;
    }
  }
  const std::size_t common_bytes = common.size() * sizeof(QueuePairAddress);
  std::vector<std::byte> mine(common_bytes + numbers.size() * sizeof(std::uint32_t));
  std::memcpy(mine.data(), common.data(), common_bytes);
  std::memcpy(mine.data() + common_bytes, numbers.data(), mine.size() - common_bytes);
  const std::vector<std::byte> all = bootstrap.all_gather(mine);

  std::vector<std::vector<QueuePairAddress>> theirs(sets.size());
  std::size_t first = 0;
  for (std::size_t set = 0; set < sets.size(); ++set) {
    for (std::size_t end = 0; end < sets[set].ends(); ++end) {
      const std::byte* of_peer = all.data() + static_cast<std::size_t>(sets[set].peer(end)) * mine.size();
      const auto place = static_cast<std::size_t>(sets[set].channel(end)) * ranks;
      QueuePairAddress& address = theirs[set].emplace_back();
      std::memcpy(static_cast<void*>(&address), of_peer + set * sizeof address, sizeof address);
      const std::size_t number = first + place + static_cast<std::size_t>(bootstrap.rank());
      std::memcpy(&address.queue_pair, of_peer + common_bytes + number * sizeof(std::uint32_t), sizeof(std::uint32_t));
    }
    first += static_cast<std::size_t>(sets[set].channels) * ranks;
  }
  return theirs;
}

/// What kernels need to reach the peers: [channels][ranks].
std::vector<RdmaPeerParams> connect_ends(const ConnectionOptions& options, int num_ranks,
                                         std::span<const QueuePairAddress> theirs, Ends* ends) {
  std::vector<RdmaPeerParams> peers(static_cast<std::size_t>(options.channels * num_ranks));
  if (ends == nullptr) return peers;
  for (std::size_t end = 0; end < options.ends(); ++end) {
    peers[static_cast<std::size_t>(options.channel(end) * num_ranks + options.peer(end))] =
        ends->connect(end, theirs[end]);
  }
  ends->start();
  return peers;
}

}  // namespace

WireKind choose_wire(std::span<const WireFacts> ranks, std::string& why_local) {
  const WireKind wanted = ranks[0].wanted.kind;
  const auto first = std::find_if(ranks.begin(), ranks.end(), [](const WireFacts& rank) { return rank.needs_rdma; });
  std::size_t elsewhere = ranks.size();
  std::size_t without_nic = ranks.size();
  bool needs_gpu_handler = false;
  bool needs_cpu_handler = false;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].wanted.kind != wanted) {
      fail<RankMismatch>("DEEP_EP_RDMA_WIRE is {} on rank 0 but {} on rank {}; it must be equal on all ranks",
                         name_of(wanted), name_of(ranks[rank].wanted.kind), rank);
    }
    if (ranks[rank].wanted.nic != ranks[0].wanted.nic) {
      fail<RankMismatch>("DEEP_EP_RDMA_WIRE is simulated with other keys on rank 0 than on rank {}; they must be equal",
                         rank);
    }
    if (!ranks[rank].needs_rdma) continue;
    needs_gpu_handler |= ranks[rank].handler == NicHandler::gpu;
    needs_cpu_handler |= ranks[rank].handler == NicHandler::cpu;
    if (elsewhere == ranks.size() && !ranks[rank].process.same_host(first->process)) elsewhere = rank;
    if (without_nic == ranks.size() && ranks[rank].why_no_nic[0] != '\0') without_nic = rank;
  }
  if (first == ranks.end()) return WireKind::local;
  if (wanted == WireKind::local || wanted == WireKind::simulated) {
    if (elsewhere != ranks.size()) {
      fail<SystemError>(
          "DEEP_EP_RDMA_WIRE={} is impossible: rank {} (host {}) and rank {} (host {}) are not on one host",
          name_of(wanted), first - ranks.begin(), first->process.host.data(), elsewhere,
          ranks[elsewhere].process.host.data());
    }
    if (wanted == WireKind::local && needs_gpu_handler) {
      throw SystemError("DEEP_EP_NIC_HANDLER=gpu is impossible with DEEP_EP_RDMA_WIRE=local: no NIC");
    }
    if (wanted == WireKind::simulated && needs_cpu_handler) {
      throw SystemError("DEEP_EP_NIC_HANDLER=cpu is impossible with DEEP_EP_RDMA_WIRE=simulated: kernels ring it");
    }
    return wanted;
  }
  if (without_nic == ranks.size()) return WireKind::verbs;
  const char* why = ranks[without_nic].why_no_nic.data();
  if (wanted == WireKind::automatic && elsewhere == ranks.size() && !needs_gpu_handler) {
    why_local = fmt::format("rank {} (host {}): {}", without_nic, ranks[without_nic].process.host.data(), why);
    return WireKind::local;
  }
  fail<SystemError>("rank {} (host {}): {}", without_nic, ranks[without_nic].process.host.data(), why);
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
  });
  deep_ep::agree(bootstrap, "looking for the NIC", [&] {
    const WireKind wanted = mine.wanted.kind;
    if (!needs_rdma || wanted == WireKind::local || wanted == WireKind::simulated) return;
    std::string why_not;
    wire.nic = find_nic(processes, bootstrap.rank(), executor.device(), why_not);
    why_not.copy(mine.why_no_nic.data(), mine.why_no_nic.size() - 1);
  });
  std::string why_local;
  const std::vector<WireFacts> all = all_gather_values(bootstrap, mine);
  wire.kind = choose_wire(all, why_local);
  wire.may_fall_back = wire.kind == WireKind::verbs && std::ranges::any_of(all, [](const WireFacts& rank) {
                         return rank.needs_rdma && rank.handler == NicHandler::automatic;
                       });
  wire.handler = wire.kind == WireKind::simulated ? NicHandler::gpu : wire.settings.nic_handler;
  if (!why_local.empty() && bootstrap.rank() == 0) {
    // On GPUs that is slow, and hardly what their owner wants.
    const bool cuda = executor.device().kind == deep_ep::Device::Kind::cuda;
    log::at(cuda ? log::Level::warn : log::Level::info,
            "rdma: a CPU thread of each rank copies what would be sent (wire local), because: {}", why_local);
  }
  return wire;
}

std::vector<ConnectedEnds> make_connected_ends(Bootstrap& bootstrap, std::span<const ConnectionOptions> sets,
                                               NicHandler wanted, bool may_fall_back, const MakeEnds& make) {
  for (NicHandler handler = wanted;;) {
    std::vector<ConnectedEnds> made(sets.size());
    agree(bootstrap, "making RDMA queue pairs", [&] {
      for (std::size_t set = 0; set < sets.size(); ++set) {
        if (!sets[set].peers.empty()) made[set].ends = make(handler, sets[set]);
      }
    });
    const std::vector<std::vector<QueuePairAddress>> theirs = exchange_addresses(bootstrap, sets, made);
    const auto connect_all = [&] {
      for (std::size_t set = 0; set < sets.size(); ++set) {
        made[set].peers = connect_ends(sets[set], bootstrap.size(), theirs[set], made[set].ends.get());
      }
    };
    if (!may_fall_back) {
      agree(bootstrap, "connecting RDMA queue pairs", connect_all);
      return made;
    }
    Outcome mine;
    std::exception_ptr thrown;
    const auto by_kernels = [](const ConnectedEnds& one) { return one.ends != nullptr && one.ends->rung_by_kernels(); };
    try {
      connect_all();
    } catch (const std::exception& error) {
      thrown = std::current_exception();
      mine.failed = true;
      mine.may_fall_back = handler == NicHandler::automatic && std::ranges::any_of(made, by_kernels) &&
                           dynamic_cast<const SystemError*>(&error) != nullptr;
      std::string(error.what()).copy(mine.why.data(), mine.why.size() - 1);
    }
    const std::vector<Outcome> all = all_gather_values(bootstrap, mine);
    const auto failed = std::ranges::find_if(all, &Outcome::failed);
    if (failed == all.end()) return made;
    if (std::ranges::any_of(all, [](const Outcome& rank) { return rank.failed && !rank.may_fall_back; })) {
      if (thrown) std::rethrow_exception(thrown);
      fail<SystemError>("connecting RDMA queue pairs failed on rank {}: {}", failed - all.begin(), failed->why.data());
    }
    if (handler != NicHandler::automatic) continue;
    handler = NicHandler::cpu;
    if (std::ranges::all_of(made, [](const ConnectedEnds& one) { return one.ends == nullptr; })) continue;
    log::warn("RDMA: a CPU thread executes what kernels post (DEEP_EP_NIC_HANDLER=cpu), because on rank {}: {}",
              failed - all.begin(), failed->why.data());
  }
}

Connections::Connections(std::shared_ptr<Executor> executor, std::shared_ptr<SymmetricHeap> heap,
                         ConnectionOptions options, AgreedWire wire, int num_ranks)
    : executor_(std::move(executor)),
      heap_(std::move(heap)),
      options_(std::move(options)),
      wire_(std::move(wire)),
      num_ranks_(num_ranks),
      peers_(static_cast<std::size_t>(options_.channels * num_ranks)),
      device_peers_(device_memory<RdmaPeerParams>(executor_, peers_.size() * sizeof(RdmaPeerParams))) {}

std::vector<std::unique_ptr<Connections>> Connections::make(Bootstrap& bootstrap, std::shared_ptr<Executor> executor,
                                                            std::shared_ptr<SymmetricHeap> heap,
                                                            std::span<const ConnectionOptions> sets,
                                                            const AgreedWire& wire) {
  std::vector<ConnectionOptions> checked(sets.begin(), sets.end());
  agree(bootstrap, "checking the RDMA connections asked for", [&] {
    for (ConnectionOptions& options : checked) {
      if (options.batch == 0) options.batch = std::min(options.depth / 2, 64U);
      check_options(options, bootstrap.rank(), bootstrap.size());
    }
  });
  std::vector<std::unique_ptr<Connections>> made;
  agree(bootstrap, "allocating the table of RDMA connections", [&] {
    for (ConnectionOptions& options : checked) {
      made.emplace_back(new Connections(executor, heap, std::move(options), wire, bootstrap.size()));
    }
  });
  std::vector<Connections*> all;
  for (const auto& one : made) all.push_back(one.get());
  connect(bootstrap, all);
  return made;
}

Connections::~Connections() = default;

void Connections::connect(Bootstrap& bootstrap, std::span<Connections* const> sets) {
  Connections& any = *sets.front();
  any.executor_->make_current();
  const AgreedWire& wire = any.wire_;
  const auto make_ends = [&](NicHandler handler, const ConnectionOptions& options) {
    if (wire.kind == WireKind::local) return make_local_ends(any.executor_, *any.heap_, bootstrap.rank(), options);
    if (wire.kind == WireKind::simulated) {
      return make_simulated_ends(any.executor_, *any.heap_, bootstrap.rank(), options, wire.settings.wire.nic);
    }
    verbs::NicAccess access = verbs::open_nic(wire.nic.value(), *any.executor_, wire.settings);
    access.handler = handler;
    return verbs::make_nic_ends(access, any.executor_, *any.heap_, options);
  };
  std::vector<ConnectionOptions> options;
  for (const Connections* one : sets) options.push_back(one->options_);
  std::vector<ConnectedEnds> connected =
      make_connected_ends(bootstrap, options, wire.handler, wire.may_fall_back, make_ends);
  agree(bootstrap, "copying the table of RDMA connections", [&] {
    const OwnStream stream(*any.executor_);
    for (std::size_t set = 0; set < sets.size(); ++set) {
      Connections& one = *sets[set];
      one.peers_ = std::move(connected[set].peers);
      any.executor_->copy(one.device_peers_.get(), one.peers_.data(), one.peers_.size() * sizeof(RdmaPeerParams),
                          stream.get());
    }
    any.executor_->synchronize(stream.get());
  });
  for (std::size_t set = 0; set < sets.size(); ++set) {
    sets[set]->ends_ = std::move(connected[set].ends);
    sets[set]->connected_ = true;
    log::info("rdma: rank {}: {}", bootstrap.rank(), sets[set]->describe());
  }
}

void Connections::reconnect(Bootstrap& bootstrap) {
  connected_ = false;
  ends_.reset();
  connect(bootstrap, std::array{this});
  bootstrap.barrier();  // where it has failed on a rank, it fails on all
}

const RdmaPeerParams& Connections::peer(int channel, int rank) const {
  return peers_.at(static_cast<std::size_t>(channel * num_ranks_ + rank));
}

void Connections::check() const {
  if (!connected_) throw SystemError("the RDMA connections are gone: making new ones has failed");
  if (ends_ == nullptr) return;
  if (const std::optional<Failure> seen = ends_->failure()) throw SystemError(rdma::describe(*seen));
}

std::string Connections::health() const {
  if (!connected_ || ends_ == nullptr) return {};
  try {
    return fmt::format("RDMA ({}): {}", ends_->describe(), ends_->health());
  } catch (const std::exception& error) {
    return fmt::format("RDMA ({}) does not say how it is: {}", ends_->describe(), error.what());
  }
}

bool Connections::drain(double most_s) const {
  if (ends_ == nullptr) return true;
  executor_->make_current();
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(most_s);
  while (!ends_->idle()) {
    if (std::chrono::steady_clock::now() > end) {
      log::warn("rdma: what was posted has not arrived within {} s and is given up", most_s);
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

void Connections::drain_at_end(int rank, double timeout_s) const noexcept {
  // Longer than a NIC takes to give up a peer that is gone (about 7 s, see QueuePairOptions).
  constexpr double kLongest_s = 10;
  try {
    drain(timeout_s == 0 ? kLongest_s : std::min(timeout_s, kLongest_s));
  } catch (const std::exception& error) {
    log::warn("buffer: rank {} cannot tell whether its peers have got all that it sent: {}", rank, error.what());
  }
}

std::string Connections::describe() const {
  return fmt::format("{} {} x {} {}, {}", options_.peers.size(), options_.peers.size() == 1 ? "peer" : "peers",
                     options_.channels, options_.channels == 1 ? "channel" : "channels",
                     !connected_        ? "gone"
                     : ends_ == nullptr ? "no NIC needed"
                                        : ends_->describe());
}

}  // namespace deep_ep::rdma
