// Compares the results of low-latency rounds with what they must be. Throws Error at the first difference.
#pragma once

#include "tools/bench/low_latency_rank.hpp"

namespace deep_ep::tools {

/// Every valid row with its scales, counts, ranges and token indices, bit for bit.
void check_low_latency_dispatch(Executor& executor, StreamHandle stream, const WorkloadShape& shape, int rank, bool fp8,
                                const LowLatencyDispatchResult& result);
/// Every sum: exact, or for LogFMT-10 within a step of the format. Where calls may go by rails, what comes of them,
/// which rounds once more for each node, is right as well.
void check_low_latency_combine(Executor& executor, StreamHandle stream, const WorkloadShape& shape, int rank,
                               LowLatencyCombine kind, const LowLatencyReach& reach,
                               const LowLatencyCombineResult& result);

}  // namespace deep_ep::tools
