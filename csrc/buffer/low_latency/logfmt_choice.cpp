#include "csrc/buffer/low_latency/logfmt_choice.hpp"

#include "csrc/support/environment.hpp"

namespace deep_ep {

LowLatencyLogfmt asked_for_logfmt(LowLatencyLogfmt asked) {
  if (asked != LowLatencyLogfmt::automatic) return asked;
  return environment::choice("DEEP_EP_LOGFMT") == "always" ? LowLatencyLogfmt::always : LowLatencyLogfmt::automatic;
}

bool logfmt_pays(const LowLatencySetup& setup) {
  return setup.logfmt == LowLatencyLogfmt::always || !setup.on_gpu();  // on CPUs nothing is gained or lost
}

}  // namespace deep_ep
