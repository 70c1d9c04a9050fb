// Tuning of one call. Results never depend on it.
#pragma once

namespace deep_ep {

/// How much of the machine a call may use. Each field is checked; 0 leaves the choice to the library.
struct Config {
  /// SMs that the call's main kernel may occupy at most, 0 to 4096; 0: for normal mode the defaults below, for
  /// low-latency calls all. More than there are counts as all.
  int num_sms = 0;
  /// Warps of a block: at most 16 in normal mode, 32 in low-latency calls, which may take fewer or more where their
  /// kernels need it. 0: what the executor's kernels were tuned for.
  int warps_per_block = 0;

  /// What `dispatch` uses when num_sms is 0, for `num_ranks` ranks in one NVLink domain: a few SMs
  /// saturate NVLink, more would only take them from the computation.
  static Config dispatch_default(int num_ranks);
  /// The same for `combine`.
  static Config combine_default(int num_ranks);
};

}  // namespace deep_ep
