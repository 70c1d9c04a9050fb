#include "csrc/buffer/options.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <span>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/buffer/checks.hpp"
#include "csrc/memory/node_membership.hpp"
#include "csrc/rdma/discovery/nic_map.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "kernels/low_latency/window.hpp"
#include "kernels/normal/rings.hpp"

namespace deep_ep {
namespace {

/// Lanes of `option`, or of `variable` where the program leaves that open: 0 where that is auto.
int lanes_of(const char* option, int asked, const char* variable) {
  if (asked == 0) return parse_number<int>(environment::choice(variable)).value_or(0);
  if (asked == 1 || asked == 2 || asked == kMostInternodeLanes) return asked;
  fail<InvalidArgument>("{}.lanes is {}, allowed: 1, 2, {}, or 0 for {}", option, asked, kMostInternodeLanes, variable);
}
static_assert(kMostInternodeLanes == kMostLowLatencyLanes);

int most_internode_lanes(const InternodeOptions& options) {
  const int bound = options.num_qps_per_rank;
  if (bound < 0) {
    fail<InvalidArgument>(
        "internode.num_qps_per_rank is {}, allowed: at least 1, or 0 for as many as the library wants", bound);
  }
  if (bound == 0) return kMostInternodeLanes;
  return std::min(kMostInternodeLanes, static_cast<int>(std::bit_floor(static_cast<unsigned>(bound))));
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

/// The heap's layout follows from these, so they must be equal.
struct Number {
  const char* name;
  std::uint64_t (*of)(const BufferOptions& options);
};
#define DEEP_EP_NUMBER(option)                                                                       \
  Number {                                                                                           \
#option, [](const BufferOptions& options) { return static_cast<std::uint64_t>(options.option); } \
  }
constexpr std::array kNumbers = {
    DEEP_EP_NUMBER(heap_bytes),
    DEEP_EP_NUMBER(window_bytes),
    DEEP_EP_NUMBER(max_local_experts),
    DEEP_EP_NUMBER(low_latency.bytes),
    DEEP_EP_NUMBER(low_latency.masking),
    DEEP_EP_NUMBER(low_latency.allow_nvlink),
    DEEP_EP_NUMBER(low_latency.rails),
    DEEP_EP_NUMBER(low_latency.lanes),
    DEEP_EP_NUMBER(internode.lanes),
    DEEP_EP_NUMBER(internode.heap_bytes),
    DEEP_EP_NUMBER(internode.window_bytes),
    DEEP_EP_NUMBER(ranks_per_node),
};
#undef DEEP_EP_NUMBER

/// The facts that a rank sends to all others.
struct Facts {
  std::array<std::uint64_t, kNumbers.size()> options{};
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

void check_same_options(std::span<const Facts> all, std::size_t own) {
  const auto& mine = all[own].options;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    for (std::size_t i = 0; i < mine.size(); ++i) {
      if (all[rank].options[i] == mine[i]) continue;
      fail<RankMismatch>("Buffer: {} is {} on rank {} but {} on rank {}; it must be equal on all ranks",
                         kNumbers[i].name, mine[i], own, all[rank].options[i], rank);
    }
  }
}

}  // namespace

BufferOptions with_environment(BufferOptions options, int num_ranks) {
  for (const auto& [name, bytes] :
       {std::pair("heap_bytes", options.heap_bytes), std::pair("window_bytes", options.window_bytes),
        std::pair("internode.heap_bytes", options.internode.heap_bytes),
        std::pair("internode.window_bytes", options.internode.window_bytes),
        std::pair("low_latency.bytes", options.low_latency.bytes)}) {
    if (bytes > kMostOptionBytes) fail<InvalidArgument>("{} is {}, allowed: at most {}", name, bytes, kMostOptionBytes);
  }
  check_range("max_local_experts", options.max_local_experts, 1, 1 << 16);
  options.ranks_per_node = asked_for_ranks_per_node(options.ranks_per_node, num_ranks);

  InternodeOptions& internode = options.internode;
  const int most = most_internode_lanes(internode);
  const int lanes = lanes_of("internode", internode.lanes, "DEEP_EP_INTERNODE_LANES");
  if (internode.lanes > most) {
    fail<InvalidArgument>("internode.lanes is {}, but internode.num_qps_per_rank is {}, allowed: at most that many",
                          internode.lanes, internode.num_qps_per_rank);
  }
  internode.lanes = std::min(lanes, most);

  LowLatencyOptions& low_latency = options.low_latency;
  if (low_latency.bytes == 0) {
    low_latency = {};  // there are no such calls
    return options;
  }
  if (low_latency.rails == LowLatencyRails::automatic) {
    const std::string word = environment::choice("DEEP_EP_LOW_LATENCY_RAILS");
    if (word == "always") low_latency.rails = LowLatencyRails::always;
    if (word == "never") low_latency.rails = LowLatencyRails::never;
  }
  low_latency.lanes = lanes_of("low_latency", low_latency.lanes, "DEEP_EP_LOW_LATENCY_LANES");
  low_latency.allow_nvlink = low_latency.allow_nvlink && may_use_nvlink();
  return options;
}

LaunchPolicy share_device(LaunchPolicy policy, const DeviceIdentity& mine, std::span<const DeviceIdentity> all) {
  if (mine.multiprocessors == 0) return policy;
  const auto here = std::count_if(all.begin(), all.end(), [&](const auto& other) { return other.uuid == mine.uuid; });
  const int common = here > 1 ? mine.multiprocessors - mine.multiprocessors / 8 : mine.multiprocessors;
  const int part = common / std::max(1, static_cast<int>(here)) - mine.kept;
  policy.multiprocessors = std::clamp(policy.multiprocessors, 1, std::max(1, part));
  return policy;
}

AgreedOptions agree_on_options(Bootstrap& bootstrap, const BufferOptions& options, const DeviceIdentity& device) {
  AgreedOptions agreed{.options = options,
                       .asked_internode_lanes = 0,
                       .timeout_s = 0,
                       .devices = {},
                       .processes = {},
                       .keeps_to_path = {}};
  BufferOptions& mine = agreed.options;
  Facts facts;
  facts.device = device;
  agree(bootstrap, "reading the options of a Buffer", [&] {
    mine = with_environment(options, bootstrap.size());
    facts.timeout_s = timeout_in_effect(options.timeout_s);
    facts.keeps_to_path = rdma::queue_pairs_keep_to_paths();
    for (std::size_t i = 0; i < kNumbers.size(); ++i) facts.options[i] = kNumbers[i].of(mine);
    facts.process = this_process();
  });
  const std::vector<Facts> all = all_gather_values(bootstrap, facts);
  check_same_options(all, static_cast<std::size_t>(bootstrap.rank()));
  agreed.timeout_s = mine.low_latency.masking ? longest_timeout(all, bootstrap.rank()) : facts.timeout_s;
  for (const Facts& rank : all) {
    agreed.devices.push_back(rank.device);
    agreed.processes.push_back(rank.process);
    agreed.keeps_to_path.push_back(rank.keeps_to_path);
  }
  agreed.asked_internode_lanes = mine.internode.lanes;
  if (mine.internode.lanes == 0) {
    const bool ethernet = std::ranges::any_of(all, &Facts::keeps_to_path);
    mine.internode.lanes = ethernet ? most_internode_lanes(mine.internode) : 1;
  }
  return agreed;
}

}  // namespace deep_ep
