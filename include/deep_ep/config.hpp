// Tuning of one call. Results never depend on it.
#pragma once
// SPDX-License-Identifier: MIT

namespace deep_ep {

/// How much of the machine a call may use.
struct Config {
  /// The most SMs of the call's main kernel, 0 to 4096; 0 leaves the choice to the library: in normal mode 10 for
  /// dispatch and 16 for combine, in low-latency calls all, of which dispatch needs two. A number above the device's
  /// means all.
  int num_sms = 0;
};

}  // namespace deep_ep
