#include "csrc/buffer/internode/lanes.hpp"

#include <algorithm>
#include <bit>

#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "kernels/internode/params.hpp"

namespace deep_ep {

int most_internode_lanes(int num_qps_per_rank) {
  if (num_qps_per_rank == 0) return kMostInternodeLanes;
  return std::min(kMostInternodeLanes, static_cast<int>(std::bit_floor(static_cast<unsigned>(num_qps_per_rank))));
}

int asked_for_internode_lanes(const InternodeOptions& options) {
  if (options.num_qps_per_rank < 0) {
    fail<InvalidArgument>(
        "internode.num_qps_per_rank is {}, allowed: at least 1, or 0 for as many as the library wants",
        options.num_qps_per_rank);
  }
  const int most = most_internode_lanes(options.num_qps_per_rank);
  const int asked = options.lanes;
  if (asked == 0) {
    return std::min(parse_number<int>(environment::choice("DEEP_EP_INTERNODE_LANES")).value_or(1), most);
  }
  if (asked != 1 && asked != 2 && asked != kMostInternodeLanes) {
    fail<InvalidArgument>("internode.lanes is {}, allowed: 1, 2, {}, or 0 for DEEP_EP_INTERNODE_LANES", asked,
                          kMostInternodeLanes);
  }
  if (asked > most) {
    fail<InvalidArgument>("internode.lanes is {}, but internode.num_qps_per_rank is {}, allowed: at most that many",
                          asked, options.num_qps_per_rank);
  }
  return asked;
}

std::uint32_t internode_depth(int lanes) {
  return std::bit_ceil(1 + 2 * static_cast<std::uint32_t>(Rings::kMostChunks / lanes));
}

}  // namespace deep_ep
