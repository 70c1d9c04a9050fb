#include "csrc/buffer/low_latency/logfmt_choice.hpp"

#include "csrc/support/environment.hpp"

namespace deep_ep {

LowLatencyLogfmt asked_for_logfmt(LowLatencyLogfmt asked) {
  if (asked != LowLatencyLogfmt::automatic) return asked;
  return environment::choice("DEEP_EP_LOGFMT") == "always" ? LowLatencyLogfmt::always : LowLatencyLogfmt::automatic;
}

bool logfmt_pays(const LowLatencySetup& setup) {
  if (!setup.on_gpu()) return true;  // nothing is gained or lost
  return setup.logfmt == LowLatencyLogfmt::always || setup.rdma();
}

}  // namespace deep_ep
