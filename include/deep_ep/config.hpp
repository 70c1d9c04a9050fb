// Tuning of one call. Results never depend on it.
#pragma once
// SPDX-License-Identifier: MIT

namespace deep_ep {

/// How much of the machine a call may use. Each field is checked; 0 leaves the choice to the library.
struct Config {
  /// The most SMs of the call's main kernel, 0 to 4096; 0: for normal mode the defaults below, for low-latency calls
  /// all. A number above the device's means all.
  int num_sms = 0;
  /// Warps of a block: at most 16 in normal mode, 32 in low-latency calls, whose kernels may take fewer or more. 0: the
  /// executor's default.
  int warps_per_block = 0;

  /// The values of `dispatch` if num_sms is 0, for `num_ranks` ranks of a node: a few SMs saturate NVLink.
  static Config dispatch_default(int num_ranks);
  /// The same for `combine`.
  static Config combine_default(int num_ranks);
};

}  // namespace deep_ep
