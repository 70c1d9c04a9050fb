// Whether rows of a low-latency combine with `use_logfmt` are encoded.
#pragma once

#include "csrc/buffer/low_latency/plan.hpp"

namespace deep_ep {

/// What `asked` means: where it is automatic, DEEP_EP_LOGFMT.
LowLatencyLogfmt asked_for_logfmt(LowLatencyLogfmt asked);

/// Are rows encoded? On GPUs by order only: encoding and decoding them takes longer than NVLink, or a NIC of 50 GB/s,
/// takes for the bytes that it saves (docs/measurements/2026-11-23-2xh200.md). The same on all ranks.
bool logfmt_pays(const LowLatencySetup& setup);

}  // namespace deep_ep
