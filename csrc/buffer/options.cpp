#include "csrc/buffer/options.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/buffer/internode/lanes.hpp"
#include "csrc/buffer/low_latency/lanes.hpp"
#include "csrc/buffer/low_latency/rails.hpp"
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

/// A rank that is masked must have been late for every rank: the greatest of all, of which 0 (for ever) is greater.
double longest_timeout(Bootstrap& bootstrap, double mine) {
  const std::vector<double> all = all_gather_values(bootstrap, mine);
  const auto [least, greatest] = std::minmax_element(all.begin(), all.end());
  if (*least == *greatest) return mine;
  const double longest = *least == 0 ? 0 : *greatest;
  log::info("buffer: rank {} has a time-out of {} s, but others have from {} to {}: with masking all take {} (0: none)",
            bootstrap.rank(), mine, *least, *greatest, longest);
  return longest;
}

/// The heap's layout follows from these, so they must be equal.
void check_same_options(Bootstrap& bootstrap, const BufferOptions& options) {
  constexpr std::array kNames = {"heap_bytes",        "window_bytes",        "max_local_experts",
                                 "low_latency.bytes", "low_latency.masking", "low_latency.allow_nvlink",
                                 "low_latency.rails", "low_latency.lanes",   "internode.lanes"};
  const std::array<std::uint64_t, kNames.size()> mine = {options.heap_bytes,
                                                         options.window_bytes,
                                                         static_cast<std::uint64_t>(options.max_local_experts),
                                                         options.low_latency.bytes,
                                                         options.low_latency.masking ? std::uint64_t{1} : 0,
                                                         options.low_latency.allow_nvlink ? std::uint64_t{1} : 0,
                                                         static_cast<std::uint64_t>(options.low_latency.rails),
                                                         static_cast<std::uint64_t>(options.low_latency.lanes),
                                                         static_cast<std::uint64_t>(options.internode.lanes)};
  const auto all = all_gather_values(bootstrap, mine);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    for (std::size_t i = 0; i < mine.size(); ++i) {
      if (all[rank][i] == mine[i]) continue;
      fail<RankMismatch>("Buffer: {} is {} on rank {} but {} on rank {}; it must be equal on all ranks", kNames[i],
                         mine[i], bootstrap.rank(), all[rank][i], rank);
    }
  }
}

}  // namespace

AgreedOptions agree_on_options(Bootstrap& bootstrap, const BufferOptions& options) {
  AgreedOptions agreed{.options = options, .timeout_s = 0};
  agree(bootstrap, "reading the options of a Buffer", [&] {
    check_size("heap_bytes", options.heap_bytes);
    check_size("window_bytes", options.window_bytes);
    check_low_latency(options.low_latency);
    agreed.timeout_s = timeout_in_effect(options.timeout_s);
    agreed.options.internode.lanes = asked_for_internode_lanes(options.internode);
    if (options.low_latency.bytes == 0) return;
    agreed.options.low_latency.rails = asked_for_rails(options.low_latency.rails);
    agreed.options.low_latency.lanes = asked_for_lanes(options.low_latency.lanes);
    agreed.options.low_latency.allow_nvlink = options.low_latency.allow_nvlink && may_use_nvlink();
  });
  check_same_options(bootstrap, agreed.options);
  if (options.low_latency.masking) agreed.timeout_s = longest_timeout(bootstrap, agreed.timeout_s);
  if (options.max_local_experts < 1 || options.max_local_experts > 1 << 16) {
    fail<InvalidArgument>("max_local_experts is {}, allowed: 1 to 65536", options.max_local_experts);
  }
  return agreed;
}

}  // namespace deep_ep
