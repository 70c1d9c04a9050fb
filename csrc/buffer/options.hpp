// The options of a Buffer as all ranks agree on them.
#pragma once

#include <cstddef>
#include <vector>

#include "csrc/executor/backend.hpp"
#include "csrc/memory/process_identity.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/buffer.hpp"

namespace deep_ep {

/// The largest size that an option may have: sums of a few do not wrap.
constexpr std::size_t kMostOptionBytes = std::size_t{1} << 56;

struct AgreedOptions {
  BufferOptions options;  ///< with what the environment says if the program leaves it open
  double timeout_s = 0;   ///< with masking the longest of all ranks'; 0: for ever
  /// Of each rank.
  std::vector<DeviceIdentity> devices;
  std::vector<ProcessIdentity> processes;
  std::vector<bool> keeps_to_path;  ///< see LaneFacts; asked where lanes are to be found
};

/// Collective: one exchange of all that a rank knows before memory is made. Throws on every rank when the options are
/// wrong on one, or differ where they must not.
AgreedOptions agree_on_options(Bootstrap& bootstrap, const BufferOptions& options, const DeviceIdentity& device = {});

}  // namespace deep_ep
