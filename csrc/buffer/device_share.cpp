#include "csrc/buffer/device_share.hpp"

#include <algorithm>

namespace deep_ep {

LaunchPolicy share_device(LaunchPolicy policy, const DeviceIdentity& mine, std::span<const DeviceIdentity> all) {
  if (mine.multiprocessors == 0) return policy;
  const auto here = std::count_if(all.begin(), all.end(), [&](const auto& other) { return other.uuid == mine.uuid; });
  const int common = here > 1 ? mine.multiprocessors - mine.multiprocessors / 8 : mine.multiprocessors;
  const int part = common / std::max(1, static_cast<int>(here)) - mine.kept;
  policy.multiprocessors = std::clamp(policy.multiprocessors, 1, std::max(1, part));
  return policy;
}

}  // namespace deep_ep
