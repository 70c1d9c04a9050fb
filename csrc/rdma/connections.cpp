#include "csrc/rdma/connections.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/executor/own_stream.hpp"
#include "csrc/rdma/connecting.hpp"
#include "csrc/rdma/local/local_ends.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "csrc/rdma/verbs/libraries.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "csrc/rdma/wire_choice.hpp"
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

}  // namespace

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

EndsOptions ends_options(const ConnectionOptions& options) {
  EndsOptions ends{.peers = {},
                   .port_offsets = {},
                   .depth = options.depth,
                   .batch = options.batch,
                   .long_messages = options.long_messages};
  for (int channel = 0; channel < options.channels; ++channel) {
    const int offset =
        options.port_offsets.empty() ? channel : options.port_offsets.at(static_cast<std::size_t>(channel));
    for (std::size_t place = 0; place < options.peers.size(); ++place) {
      ends.peers.push_back(options.peers[place]);
      ends.port_offsets.push_back(offset + static_cast<int>(place));
    }
  }
  return ends;
}

Connections::Connections(Bootstrap& bootstrap, std::shared_ptr<Executor> executor, std::shared_ptr<SymmetricHeap> heap,
                         ConnectionOptions options, AgreedWire wire)
    : executor_(std::move(executor)),
      heap_(std::move(heap)),
      options_(std::move(options)),
      wire_(std::move(wire)),
      num_ranks_(bootstrap.size()) {
  if (options_.batch == 0) options_.batch = std::min(options_.depth / 2, 64U);
  agree(bootstrap, "checking the RDMA connections asked for",
        [&] { check_options(options_, bootstrap.rank(), num_ranks_); });
  const std::size_t count = static_cast<std::size_t>(options_.channels) * static_cast<std::size_t>(num_ranks_);
  try {
    agree(bootstrap, "allocating the table of RDMA connections",
          [&] { device_peers_ = static_cast<RdmaPeerParams*>(executor_->allocate(count * sizeof(RdmaPeerParams))); });
    peers_.resize(count);
    connect(bootstrap);
  } catch (...) {
    ends_.reset();
    executor_->free(device_peers_);
    throw;
  }
}

Connections::~Connections() {
  ends_.reset();
  executor_->free(device_peers_);
}

void Connections::connect(Bootstrap& bootstrap) {
  executor_->make_current();
  const auto make = [&](NicHandler handler) -> std::unique_ptr<Ends> {
    if (options_.peers.empty()) return nullptr;
    const EndsOptions options = ends_options(options_);
    if (wire_.kind == WireKind::local) return make_local_ends(executor_, *heap_, bootstrap.rank(), options);
    if (wire_.kind == WireKind::simulated) {
      return make_simulated_ends(executor_, *heap_, bootstrap.rank(), options, wire_.settings.wire.nic);
    }
    verbs::NicAccess access = verbs::open_nic(wire_.nic.value(), *executor_, wire_.settings);
    access.handler = handler;
    return verbs::make_nic_ends(access, executor_, *heap_, options);
  };
  ConnectedEnds connected = make_connected_ends(bootstrap, options_, wire_.handler, wire_.may_fall_back, make);
  peers_ = std::move(connected.peers);
  agree(bootstrap, "copying the table of RDMA connections", [&] {
    const OwnStream stream(*executor_);
    executor_->copy(device_peers_, peers_.data(), peers_.size() * sizeof(RdmaPeerParams), stream.get());
    executor_->synchronize(stream.get());
  });
  ends_ = std::move(connected.ends);
  connected_ = true;
  log::info("rdma: rank {}: {}", bootstrap.rank(), describe());
}

void Connections::reconnect(Bootstrap& bootstrap) {
  connected_ = false;
  ends_.reset();
  connect(bootstrap);
  bootstrap.barrier();  // where it has failed on a rank, it fails on all
}

const RdmaPeerParams& Connections::peer(int channel, int rank) const {
  return peers_.at(static_cast<std::size_t>(channel * num_ranks_ + rank));
}

bool Connections::reaches(int rank) const {
  return std::find(options_.peers.begin(), options_.peers.end(), rank) != options_.peers.end();
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
