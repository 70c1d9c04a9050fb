// Whether rows of a low-latency combine with `use_logfmt` are encoded.
#pragma once

#include "csrc/buffer/low_latency/plan.hpp"

namespace deep_ep {

/// What `asked` means: where it is automatic, DEEP_EP_LOGFMT.
LowLatencyLogfmt asked_for_logfmt(LowLatencyLogfmt asked);

/// Encoding and decoding a row takes longer than NVLink takes for the bytes that it saves, for any number of tokens
/// that was measured (docs/measurements/2026-11-23-2xh200.md); a NIC is slower. The same on all ranks.
bool logfmt_pays(const LowLatencySetup& setup);

}  // namespace deep_ep
