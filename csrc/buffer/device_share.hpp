// How much of a device a rank may use: kernels of ranks that share one wait for each other too.
#pragma once

#include <span>

#include "csrc/executor/backend.hpp"

namespace deep_ep {

/// The policy of a rank with `mine`, where all ranks have said what they run on. Blocks must run side by side, those of
/// ranks on one GPU as well; so each has an equal part of its multiprocessors at most, whatever its context has: with
/// CUDA MPS and no percentage set, every context has all of them. An eighth is left free for other kernels of the
/// ranks: four contexts with 32 of 132 each, which is what CUDA MPS makes of 25 %, stopped each other on an H200, with
/// 29 they do not.
LaunchPolicy share_device(LaunchPolicy policy, const DeviceIdentity& mine, std::span<const DeviceIdentity> all);

}  // namespace deep_ep
