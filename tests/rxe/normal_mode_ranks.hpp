// Normal mode of a rank, whatever wire it takes, against the oracle.
#pragma once

#include <memory>

#include "deep_ep/bootstrap.hpp"

namespace deep_ep::test {

/// Layouts, dispatches and combines between nodes of `ranks_per_node` ranks, through rings so small that they wrap.
/// Throws the first difference. All ranks call it.
void run_normal_mode(const std::shared_ptr<Bootstrap>& bootstrap, int ranks_per_node);

}  // namespace deep_ep::test
