#include "csrc/buffer/options.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/buffer/internode/lanes.hpp"
#include "csrc/buffer/low_latency/lanes.hpp"
#include "csrc/buffer/low_latency/rails.hpp"
#include "csrc/memory/node_membership.hpp"
#include "csrc/rdma/discovery/nic_map.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

void check_size(const char* name, std::size_t bytes) {
  if (bytes > kMostOptionBytes) fail<InvalidArgument>("{} is {}, allowed: at most {}", name, bytes, kMostOptionBytes);
}

const char* name_of(LowLatencyRails rails) { return rails == LowLatencyRails::always ? "always" : "never"; }

/// What the program says, wherever it matters or not: options of calls that the buffer has no memory for are a mistake.
void check_low_latency(const LowLatencyOptions& options) {
  check_size("low_latency.bytes", options.bytes);
  check_lanes(options.lanes);
  if (options.bytes != 0) return;
  const auto refuse = [](std::string_view option, std::string_view value) {
    fail<InvalidArgument>("low_latency.{} is {}, which needs low_latency.bytes, but that is 0", option, value);
  };
  if (options.masking) refuse("masking", "true");
  if (!options.allow_nvlink) refuse("allow_nvlink", "false");
  if (options.rails != LowLatencyRails::automatic) refuse("rails", name_of(options.rails));
  if (options.lanes != 0) refuse("lanes", fmt::format("{}", options.lanes));
}

/// Where another library's variable switches it off, its user may not have thought of this one.
bool may_use_nvlink() {
  const environment::Value word = environment::Reader().value("DEEP_EP_NVLINK");
  if (word.text != "off") return true;
  if (!environment::is_own(word.name)) {
    log::warn("{} is set: low-latency calls do not use NVLink (DEEP_EP_NVLINK=on: they do)", word.name);
  }
  return false;
}

/// The facts that a rank sends to all others.
struct Facts {
  std::array<std::uint64_t, 10> options{};
  double timeout_s = 0;
  DeviceIdentity device;
  ProcessIdentity process;
  bool keeps_to_path = false;
};

/// A rank that is masked must have been late for every rank: the greatest of all, of which 0 (for ever) is greater.
double longest_timeout(std::span<const Facts> all, int rank) {
  const double mine = all[static_cast<std::size_t>(rank)].timeout_s;
  const auto [least, greatest] = std::ranges::minmax(all, {}, &Facts::timeout_s);
  if (least.timeout_s == greatest.timeout_s) return mine;
  const double longest = least.timeout_s == 0 ? 0 : greatest.timeout_s;
  log::info("buffer: rank {} has a time-out of {} s, but others have from {} to {}: with masking all take {} (0: none)",
            rank, mine, least.timeout_s, greatest.timeout_s, longest);
  return longest;
}

/// The heap's layout follows from these, so they must be equal.
std::array<std::uint64_t, 10> numbers_of(const BufferOptions& options) {
  return {options.heap_bytes,
          options.window_bytes,
          static_cast<std::uint64_t>(options.max_local_experts),
          options.low_latency.bytes,
          options.low_latency.masking ? std::uint64_t{1} : 0,
          options.low_latency.allow_nvlink ? std::uint64_t{1} : 0,
          static_cast<std::uint64_t>(options.low_latency.rails),
          static_cast<std::uint64_t>(options.low_latency.lanes),
          static_cast<std::uint64_t>(options.internode.lanes),
          static_cast<std::uint64_t>(options.ranks_per_node)};
}

void check_same_options(std::span<const Facts> all, std::size_t own) {
  constexpr std::array kNames = {"heap_bytes",        "window_bytes",        "max_local_experts",
                                 "low_latency.bytes", "low_latency.masking", "low_latency.allow_nvlink",
                                 "low_latency.rails", "low_latency.lanes",   "internode.lanes",
                                 "ranks_per_node"};
  const auto& mine = all[own].options;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    for (std::size_t i = 0; i < mine.size(); ++i) {
      if (all[rank].options[i] == mine[i]) continue;
      fail<RankMismatch>("Buffer: {} is {} on rank {} but {} on rank {}; it must be equal on all ranks", kNames[i],
                         mine[i], own, all[rank].options[i], rank);
    }
  }
}

}  // namespace

AgreedOptions agree_on_options(Bootstrap& bootstrap, const BufferOptions& options, const DeviceIdentity& device) {
  AgreedOptions agreed{.options = options, .timeout_s = 0, .devices = {}, .processes = {}, .keeps_to_path = {}};
  BufferOptions& mine = agreed.options;
  Facts facts;
  facts.device = device;
  agree(bootstrap, "reading the options of a Buffer", [&] {
    check_size("heap_bytes", options.heap_bytes);
    check_size("window_bytes", options.window_bytes);
    check_low_latency(options.low_latency);
    facts.timeout_s = timeout_in_effect(options.timeout_s);
    mine.ranks_per_node = asked_for_ranks_per_node(options.ranks_per_node, bootstrap.size());
    mine.internode.lanes = asked_for_internode_lanes(options.internode);
    if (options.low_latency.bytes != 0) {
      mine.low_latency.rails = asked_for_rails(options.low_latency.rails);
      mine.low_latency.lanes = asked_for_lanes(options.low_latency.lanes);
      mine.low_latency.allow_nvlink = options.low_latency.allow_nvlink && may_use_nvlink();
      if (mine.low_latency.lanes == 0) facts.keeps_to_path = rdma::nics_are_on_ethernet();
    }
    facts.options = numbers_of(mine);
    facts.process = this_process();
  });
  const std::vector<Facts> all = all_gather_values(bootstrap, facts);
  check_same_options(all, static_cast<std::size_t>(bootstrap.rank()));
  agreed.timeout_s = options.low_latency.masking ? longest_timeout(all, bootstrap.rank()) : facts.timeout_s;
  for (const Facts& rank : all) {
    agreed.devices.push_back(rank.device);
    agreed.processes.push_back(rank.process);
    agreed.keeps_to_path.push_back(rank.keeps_to_path);
  }
  if (options.max_local_experts < 1 || options.max_local_experts > 1 << 16) {
    fail<InvalidArgument>("max_local_experts is {}, allowed: 1 to 65536", options.max_local_experts);
  }
  return agreed;
}

}  // namespace deep_ep
