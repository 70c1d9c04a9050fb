#include "csrc/buffer/options.hpp"

#include <array>
#include <cstddef>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/buffer/low_latency/rails.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

/// The heap's layout follows from these, so they must be equal.
void check_same_options(Bootstrap& bootstrap, const BufferOptions& options) {
  constexpr std::array kNames = {"heap_bytes",        "window_bytes",        "max_local_experts",
                                 "low_latency_bytes", "low_latency_masking", "allow_nvlink_for_low_latency",
                                 "low_latency_rails"};
  const std::array<std::uint64_t, kNames.size()> mine = {options.heap_bytes,
                                                         options.window_bytes,
                                                         static_cast<std::uint64_t>(options.max_local_experts),
                                                         options.low_latency_bytes,
                                                         options.low_latency_masking ? std::uint64_t{1} : 0,
                                                         options.allow_nvlink_for_low_latency ? std::uint64_t{1} : 0,
                                                         static_cast<std::uint64_t>(options.low_latency_rails)};
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
    agreed.timeout_s = options.timeout_s ? *options.timeout_s : environment::number("DEEP_EP_TIMEOUT_S");
    if (!(agreed.timeout_s >= 0)) {
      fail<InvalidArgument>("timeout_s is {}, allowed: 0 (for ever) or more", agreed.timeout_s);
    }
    if (options.low_latency_bytes != 0) agreed.options.low_latency_rails = asked_for_rails(options.low_latency_rails);
  });
  check_same_options(bootstrap, agreed.options);
  if (options.max_local_experts < 1 || options.max_local_experts > 1 << 16) {
    fail<InvalidArgument>("max_local_experts is {}, allowed: 1 to 65536", options.max_local_experts);
  }
  return agreed;
}

}  // namespace deep_ep
