// Tuning of one call. Results never depend on it.
#pragma once

namespace deep_ep {

struct Config {
  int num_sms = 0;          ///< SMs the main kernel may occupy at most; 0 = the default for the rank count
  int warps_per_block = 0;  ///< 0 = the executor's choice

  /// What `dispatch` and `combine` use when num_sms is 0, for `num_ranks` ranks in one NVLink domain.
  /// A few SMs saturate NVLink; more only take them from the computation (docs/measurements/).
  static Config dispatch_default(int num_ranks);
  static Config combine_default(int num_ranks);
};

}  // namespace deep_ep
