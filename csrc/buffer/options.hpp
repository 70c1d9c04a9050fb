// The options of a Buffer as all ranks agree on them, and what the program leaves to the environment or to the library.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "csrc/executor/backend.hpp"
#include "csrc/memory/process_identity.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/buffer.hpp"

namespace deep_ep {

/// The largest size that an option may have: sums of a few do not wrap.
constexpr std::size_t kMostOptionBytes = std::size_t{1} << 56;

struct AgreedOptions {
  /// With what the environment says if the program leaves it open; lanes 0: see BufferPlan::choose_lanes.
  BufferOptions options;
  /// Of each rank.
  std::vector<DeviceIdentity> devices;
  std::vector<ProcessIdentity> processes;
  bool replaces_ranks = false;  ///< some ranks have had the buffer before
};

/// Collective: one exchange of all that a rank knows before memory is made. Throws on every rank when the options are
/// wrong on one, or differ where they must not. `replaces`: this rank has the buffer, and others are replaced.
AgreedOptions agree_on_options(Bootstrap& bootstrap, const BufferOptions& options, const DeviceIdentity& device = {},
                               bool replaces = false);

/// The options with what the environment says where the program leaves it open, checked: InvalidArgument. Lanes are 0
/// where that is auto.
BufferOptions with_environment(BufferOptions options, int num_ranks);

/// `asked`, or what DEEP_EP_LOW_LATENCY_SUMS says.
LowLatencySums sums_in_effect(LowLatencySums asked);
/// What of a channel of a sum travels besides the upper 16 bits: see CombineRowFormat.
constexpr int rest_bits_of(LowLatencySums sums) {
  return sums == LowLatencySums::bf16 ? 0 : sums == LowLatencySums::fp24 ? 8 : 16;
}

/// The policy of a rank with `mine`, where all ranks have said what they run on. Kernels of ranks that share a GPU wait
/// for each other too, so all their blocks must run side by side: each rank has an equal part of its multiprocessors at
/// most, whatever its context has: with CUDA MPS and no percentage set, every context has all of them. An eighth is
/// left free for other kernels of the ranks: four contexts with 32 of 132 each, which is what CUDA MPS makes of 25 %,
/// stopped each other on an H200, with 29 they do not.
LaunchPolicy share_device(LaunchPolicy policy, const DeviceIdentity& mine, std::span<const DeviceIdentity> all);

}  // namespace deep_ep
