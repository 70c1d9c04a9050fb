#include "csrc/rdma/connections.hpp"

#include <array>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/memory/executor_memory.hpp"
#include "csrc/rdma/local/local_ends.hpp"
#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/executor.hpp"
#include "simulation/simulated_ends.hpp"

namespace deep_ep::rdma {
namespace {

/// Once in this process.
void log_map(const NicMap& map, const RdmaSettings& settings) {
  static std::atomic_flag is_logged;
  if (is_logged.test_and_set()) return;
  if (!settings.taken.empty()) log::info("rdma: in effect: {}", fmt::join(settings.taken, ", "));
  for (const NicMapRow& row : map.rows) log::info("rdma: {}", row.text());
  for (const std::string& nic : map.unused) log::info("rdma: not used: {}", nic);
  for (const std::string& warning : map.warnings) log::warn("rdma: {}", warning);
}

/// SystemError if this rank has no NIC that can be used.
std::vector<NicAssignment> find_nics_of(std::span<const ProcessIdentity> processes, int rank,
                                        const deep_ep::Device& device, const RdmaSettings& settings) {
  const auto& mine = processes[static_cast<std::size_t>(rank)];
  const auto on_this_host = [&](const ProcessIdentity& process) { return process.same_host(mine); };
  const auto local_rank = std::count_if(processes.begin(), processes.begin() + rank, on_this_host);
  const auto local_ranks = std::count_if(processes.begin(), processes.end(), on_this_host);
  const bool cuda = device.kind == deep_ep::Device::Kind::cuda;
  const NicMap map = map_gpus_to_nics(cuda ? topology::find_gpus({}) : ranks_without_gpu(static_cast<int>(local_ranks)),
                                      find_nics({}), settings);
  log_map(map, settings);
  std::vector<NicAssignment> nics =
      cuda ? nics_of_cuda_device(map, device.index) : nics_of(map, static_cast<std::size_t>(local_rank));
  verbs::verbs_functions();  // refuses where libibverbs cannot be used
  return nics;
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
  const auto first = [&](const auto& is_one) { return std::ranges::find_if(ranks, is_one); };
  const auto elsewhere = first([&](const WireFacts& rank) { return !rank.process.same_host(ranks[0].process); });
  const auto without_nic = first([](const WireFacts& rank) { return rank.why_no_nic[0] != '\0'; });
  // A handler that was asked for, and has nothing to ring without a NIC.
  const auto rings_nic = first(
      [](const WireFacts& rank) { return rank.handler == NicHandler::gpu || rank.handler == NicHandler::doorbell; });
  if (wanted == WireKind::local || wanted == WireKind::simulated) {
    if (elsewhere != ranks.end()) {
      fail<SystemError>(
          "DEEP_EP_RDMA_WIRE={} is impossible: rank 0 (host {}) and rank {} (host {}) are not on one host",
          name_of(wanted), ranks[0].process.host.data(), elsewhere - ranks.begin(), elsewhere->process.host.data());
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

void AgreedWire::decide(std::string& why_local) {
  kind = choose_wire(ranks, why_local);
  bytes_per_ns = std::ranges::min(ranks, {}, &WireFacts::bytes_per_ns).bytes_per_ns;
  num_nics = std::ranges::min(ranks, {}, &WireFacts::num_nics).num_nics;
}

AgreedWire AgreedWire::agree(Bootstrap& bootstrap, const Executor& executor, std::span<const ProcessIdentity> processes,
                             std::optional<RdmaSettings> settings) {
  AgreedWire wire;
  wire.settings = settings ? *std::move(settings) : read_settings();
  WireFacts mine{.process = processes[static_cast<std::size_t>(bootstrap.rank())],
                 .wanted = wire.settings.wire,
                 .handler = wire.settings.nic_handler,
                 .rail_only = wire.settings.rail_only};
  if (mine.wanted.kind != WireKind::local && mine.wanted.kind != WireKind::simulated) {
    try {
      wire.nics = find_nics_of(processes, bootstrap.rank(), executor.device(), wire.settings);
      wire.nics[0].nic.name.copy(mine.nic.data(), mine.nic.size() - 1);
      mine.path = verbs::path_by(wire.settings, wire.nics[0]);
      mine.num_nics = static_cast<int>(wire.nics.size());
      mine.keeps_to_path = rdma::keeps_to_path(wire.nics);
      double gbps = 0;
      for (const NicAssignment& nic : wire.nics) gbps += nic.port.rate_gbps;
      if (gbps > 0) mine.bytes_per_ns = gbps / 8;
    } catch (const SystemError& error) {
      std::string_view(error.what()).copy(mine.why_no_nic.data(), mine.why_no_nic.size() - 1);
    }
  }
  std::string why_local;
  wire.ranks = all_gather_values(bootstrap, mine);
  wire.decide(why_local);
  NicHandler& handler = wire.settings.nic_handler;
  if (wire.kind == WireKind::simulated && handler != NicHandler::doorbell) handler = NicHandler::gpu;
  // For the wire `local`, and for kernels on the CPU, there is no other.
  const bool cuda = executor.device().kind == deep_ep::Device::Kind::cuda;
  const bool only_cpu = wire.kind == WireKind::local || (wire.kind == WireKind::verbs && !cuda);
  if (only_cpu && handler == NicHandler::automatic) handler = NicHandler::cpu;
  if (!why_local.empty() && bootstrap.rank() == 0) {
    // On GPUs that is slow, and hardly what their owner wants.
    (cuda ? log::warn : log::info)(
        "rdma: a CPU thread of each rank copies what would be sent (wire local), because: {}", why_local);
  }
  return wire;
}

namespace {

/// Opens each NIC once. Refers to its arguments.
MakeEnds ends_of(const std::shared_ptr<Executor>& executor, const SymmetricHeap& heap, const AgreedWire& wire) {
  return [&, opened = std::vector<std::optional<verbs::NicAccess>>(wire.nics.size())](
             NicHandler handler, const ConnectionOptions& options) mutable {
    if (wire.kind == WireKind::local) return make_local_ends(executor, heap, options);
    if (wire.kind == WireKind::simulated) {
      return make_simulated_ends(executor, heap, options, wire.settings.wire.nic, handler);
    }
    const auto place = static_cast<std::size_t>(options.nic);
    if (!opened[place]) opened[place] = verbs::open_nic(wire.nics[place], *executor, wire.settings, heap);
    verbs::NicAccess& nic = *opened[place];
    for (int rail = static_cast<int>(nic.landing_nics.size()); rail < options.rail_width; ++rail) {
      const int owner = options.rank - options.rail_of(options.rank) + rail;
      const WireFacts& facts = wire.ranks[static_cast<std::size_t>(owner)];
      nic.landing_nics.push_back(
          owner == options.rank ? nullptr : nic.open(facts.nic.data(), facts.path, verbs::verbs_functions(), heap));
    }
    return verbs::make_nic_ends(handler, nic, executor, options);
  };
}

/// Collective. Clears the rail_width of sets whose peers are all reached at their own NICs.
void keep_to_rails(Bootstrap& bootstrap, std::span<ConnectionOptions> sets, const AgreedWire& wire,
                   const MakeEnds& make) {
  const ConnectionOptions& widest = *std::ranges::max_element(sets, {}, &ConnectionOptions::rail_width);
  const int width = widest.rail_width;
  Choice rail_only = width > 1 ? wire.settings.rail_only : Choice::no;
  std::string why;
  if (rail_only == Choice::automatic && wire.kind != WireKind::local) {
    why = why_unreached(bootstrap, width, /*by_landings=*/false, widest.sink, make);
    if (!why.empty()) rail_only = Choice::yes;
  }
  if (rail_only != Choice::yes) {
    for (ConnectionOptions& set : sets) set.rail_width = 0;
    return;
  }
  const std::string why_not =
      wire.kind == WireKind::local ? "" : why_unreached(bootstrap, width, /*by_landings=*/true, widest.sink, make);
  if (!why_not.empty()) {
    fail<SystemError>(
        "low-latency calls have no path between rails. Directly: {}. Over rails, where NICs of a node receive for each "
        "other: {}. A buffer without low_latency.bytes needs no such path",
        why.empty() ? "not tried, as DEEP_EP_RAIL_ONLY is 1" : why, why_not);
  }
  if (bootstrap.rank() == 0) {
    log::info(
        "rdma: low-latency calls keep to {} rails (DEEP_EP_RAIL_ONLY={}), NICs of a node receive for each other{}{}",
        width, name_of(wire.settings.rail_only), why.empty() ? "" : ", because ", why);
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
  const DeviceScope device(*executor);
  const MakeEnds make_ends = ends_of(executor, *heap, wire);
  keep_to_rails(bootstrap, filled, wire, make_ends);
  std::vector<std::unique_ptr<Connections>> made;
  std::vector<Connections*> all;
  for (ConnectionOptions& options : filled) {
    // What keeps to rails has one NIC, as other ranks receive by it.
    options.num_nics = options.rail_width != 0 ? 1 : std::min(wire.num_nics, options.channels);
    made.emplace_back(new Connections(executor, heap, options, wire));
    all.push_back(made.back().get());
  }
  connect(bootstrap, all, make_ends);
  return made;
}

Connections::~Connections() = default;

void Connections::connect(Bootstrap& bootstrap, std::span<Connections* const> sets, const MakeEnds& make) {
  const AgreedWire& wire = sets.front()->wire_;
  std::vector<ConnectionOptions> parts;  // of each set, by NIC
  for (const Connections* one : sets) {
    for (int nic = 0; nic < one->options_.num_nics; ++nic) parts.emplace_back(one->options_).nic = nic;
  }
  std::vector<ConnectedEnds> connected =
      make_connected_ends(bootstrap, parts, wire.settings.nic_handler, wire.kind == WireKind::verbs, make);
  auto part = connected.begin();
  for (Connections* const set : sets) {
    std::vector<RdmaQueuePair> peers(static_cast<std::size_t>(set->options_.channels * bootstrap.size()));
    for (int nic = 0; nic < set->options_.num_nics; ++nic, ++part) {
      const ConnectionOptions& options = parts[static_cast<std::size_t>(part - connected.begin())];
      for (std::size_t end = 0; end < part->params.size(); ++end) {
        const int place = options.channel(end) * bootstrap.size() + options.peer(end);
        peers[static_cast<std::size_t>(place)] = part->params[end];
      }
      if (part->ends != nullptr) set->ends_.push_back(std::move(part->ends));
    }
    const std::size_t bytes = peers.size() * sizeof(RdmaQueuePair);
    if (set->device_peers_ == nullptr) set->device_peers_ = device_memory<RdmaQueuePair>(set->executor_, bytes);
    copy_now(*set->executor_, set->device_peers_.get(), peers.data(), bytes);
  }
  for (const Connections* const set : sets) log::info("rdma: rank {}: {}", bootstrap.rank(), set->describe());
}

void Connections::reconnect(Bootstrap& bootstrap) {
  ends_.clear();
  const DeviceScope device(*executor_);
  connect(bootstrap, std::array{this}, ends_of(executor_, *heap_, wire_));
  bootstrap.barrier();  // where it has failed on a rank, it fails on all
}

void Connections::check() const {
  if (ends_.empty() && !options_.peers.empty())
    throw SystemError("the RDMA connections are gone: making new ones has failed");
  for (const auto& ends : ends_) {
    if (const std::string seen = ends->failure(); !seen.empty()) throw SystemError(seen);
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
    const DeviceScope device(*executor_);
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
                     !ends_.empty()           ? fmt::format("{}", fmt::join(of_nics, " and "))
                     : options_.peers.empty() ? "no NIC needed"
                                              : "gone");
}

}  // namespace deep_ep::rdma
