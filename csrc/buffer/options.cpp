#include "csrc/buffer/options.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <ranges>
#include <string_view>
#include <tuple>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/buffer/checks.hpp"
#include "csrc/memory/node_membership.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "csrc/support/text.hpp"
#include "kernels/low_latency/window.hpp"
#include "kernels/normal/rings.hpp"

namespace deep_ep {
namespace {

/// Lanes of `option`, or of `variable` where the program leaves that open: 0 where that is auto.
int lanes_of(const char* option, int asked, const char* variable) {
  if (asked == 0) return parse_number<int>(environment::text(variable)).value_or(0);
  if (asked == 1 || asked == 2 || asked == kMostInternodeLanes) return asked;
  fail<InvalidArgument>("{}.lanes is {}, allowed: 1, 2, {}, or 0 for {}", option, asked, kMostInternodeLanes, variable);
}
static_assert(kMostInternodeLanes == kMostLowLatencyLanes);

/// The heap's layout follows from these, so they must be equal; and a rank that is masked has been late for every rank.
auto numbers_of(const BufferOptions& options) {
  const auto number = [](std::string_view name, auto value) {
    return std::pair(name, static_cast<std::uint64_t>(value));
  };
  const LowLatencyOptions& low_latency = options.low_latency;
  const InternodeOptions& internode = options.internode;
  return std::array{
      number("heap_bytes", options.heap_bytes),
      number("window_bytes", options.window_bytes),
      number("max_local_experts", options.max_local_experts),
      number("low_latency.bytes", low_latency.bytes),
      number("low_latency.masking", low_latency.masking),
      number("the time-out in ms of a buffer with masking",
             low_latency.masking ? std::ceil(std::min(*options.timeout_s, 1e9) * 1e3) : 0),
      number("low_latency.allow_nvlink", low_latency.allow_nvlink),
      number("low_latency.rails", low_latency.rails),
      number("low_latency.sums", low_latency.sums),
      number("low_latency.lanes", low_latency.lanes),
      number("internode.lanes", internode.lanes),
      number("internode.num_qps_per_rank", internode.num_qps_per_rank),
      number("internode.heap_bytes", internode.heap_bytes),
      number("ranks_per_node", options.ranks_per_node),
  };
}

/// The facts that a rank sends to all others.
struct Facts {
  std::array<std::uint64_t, std::tuple_size_v<decltype(numbers_of({}))>> options{};
  DeviceIdentity device;
  ProcessIdentity process;
  bool replaces = false;
};

}  // namespace

LowLatencySums sums_in_effect(LowLatencySums asked) {
  if (asked != LowLatencySums::automatic) return asked;
  const std::string word = environment::text("DEEP_EP_LOW_LATENCY_SUMS");
  return word == "bf16" ? LowLatencySums::bf16 : word == "fp24" ? LowLatencySums::fp24 : LowLatencySums::fp32;
}

BufferOptions with_environment(BufferOptions options, int num_ranks) {
  options.timeout_s = timeout_in_effect(options.timeout_s);
  for (const auto& [name, value] : numbers_of(options)) {
    if (!name.ends_with("bytes") || value <= kMostOptionBytes) continue;
    fail<InvalidArgument>("{} is {}, allowed: at most {}", name, value, kMostOptionBytes);
  }
  if (options.window_bytes > options.heap_bytes) {
    fail<InvalidArgument>("window_bytes is {}, allowed: at most heap_bytes, {}", options.window_bytes,
                          options.heap_bytes);
  }
  InternodeOptions& internode = options.internode;
  check_range("max_local_experts", options.max_local_experts, 1, 1 << 16);
  options.ranks_per_node = asked_for_ranks_per_node(options.ranks_per_node, num_ranks);

  internode.lanes = lanes_of("internode", internode.lanes, "DEEP_EP_INTERNODE_LANES");
  check_range("internode.num_qps_per_rank", internode.num_qps_per_rank, 0, INT32_MAX);

  LowLatencyOptions& low_latency = options.low_latency;
  if (low_latency.bytes == 0) {
    low_latency = {};  // there are no such calls
    return options;
  }
  if (low_latency.rails == LowLatencyRails::automatic) {
    const std::string word = environment::text("DEEP_EP_LOW_LATENCY_RAILS");
    if (word == "always") low_latency.rails = LowLatencyRails::always;
    if (word == "never") low_latency.rails = LowLatencyRails::never;
  }
  low_latency.sums = sums_in_effect(low_latency.sums);
  low_latency.lanes = lanes_of("low_latency", low_latency.lanes, "DEEP_EP_LOW_LATENCY_LANES");
  if (!low_latency.allow_nvlink) return options;
  const environment::Value word = environment::Reader{}.value("DEEP_EP_NVLINK");
  low_latency.allow_nvlink = word.text != "off";
  if (!low_latency.allow_nvlink && !environment::is_own(word.name)) {  // set for another library
    log::warn("{} is set: low-latency calls do not use NVLink (DEEP_EP_NVLINK=on: they do)", word.name);
  }
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

AgreedOptions agree_on_options(Bootstrap& bootstrap, const BufferOptions& options, const DeviceIdentity& device,
                               bool replaces) {
  AgreedOptions agreed;
  BufferOptions& mine = agreed.options = with_environment(options, bootstrap.size());
  Facts facts{.device = device, .process = this_process(), .replaces = replaces};
  std::ranges::copy(numbers_of(mine) | std::views::values, facts.options.begin());
  const std::vector<Facts> all = all_gather_values(bootstrap, facts);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    agreed.devices.push_back(all[rank].device);
    agreed.processes.push_back(all[rank].process);
    agreed.replaces_ranks |= all[rank].replaces;
    for (std::size_t i = 0; i < facts.options.size(); ++i) {
      if (all[rank].options[i] == facts.options[i]) continue;
      fail<RankMismatch>("Buffer: {} is {} on rank {} but {} on rank {}; it must be equal on all ranks",
                         numbers_of(mine)[i].first, facts.options[i], bootstrap.rank(), all[rank].options[i], rank);
    }
  }
  return agreed;
}

}  // namespace deep_ep
