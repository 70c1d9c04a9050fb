// Low-latency calls of a rank, whatever wire they take, against the oracle.
#pragma once

#include <memory>

#include "deep_ep/bootstrap.hpp"

namespace deep_ep::test {

/// Dispatches and combines in several formats, each twice in a row. Throws the first difference. All ranks call it.
void run_low_latency_calls(const std::shared_ptr<Bootstrap>& bootstrap);

}  // namespace deep_ep::test
