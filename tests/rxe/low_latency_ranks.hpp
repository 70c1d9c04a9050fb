// Low-latency calls of a rank, whatever wire they take, against the oracle.
#pragma once

#include <memory>

#include "deep_ep/bootstrap.hpp"

namespace deep_ep::test {

/// Dispatches and combines in several formats, each twice in a row. Throws the first difference. All ranks call it.
/// `rails_of`: ranks of a node, where rows go by rails; else 0.
void run_low_latency_calls(const std::shared_ptr<Bootstrap>& bootstrap, int rails_of = 0);

}  // namespace deep_ep::test
