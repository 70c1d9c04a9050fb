// Compares the results of a benchmark's rounds with what they must be. Throws Error at the first difference.
#pragma once

#include "deep_ep/buffer.hpp"
#include "tools/bench/workload.hpp"

namespace deep_ep::tools {

void check_dispatched_bf16(Executor& executor, StreamHandle stream, const WorkloadShape& shape, const Routes& routes,
                           int rank, const DispatchResult& result);
void check_dispatched_8bit(Executor& executor, StreamHandle stream, const WorkloadShape& shape, const Routes& routes,
                           int rank, const DispatchResult& result);
/// The experts were the identity: every token comes back as often as it was sent.
void check_combined(Executor& executor, StreamHandle stream, const WorkloadShape& shape, const Routes& routes, int rank,
                    const CombineResult& result);

}  // namespace deep_ep::tools
