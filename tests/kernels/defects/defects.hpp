// Kernels with a mistake each, for the check of lines that a buffer over a fabric makes: line_defects.cu.
#pragma once

#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/target.hpp"

namespace deep_ep {
struct LineTestParams;
}

DEEP_EP_DECLARE_KERNEL(defect_torn_lines, deep_ep::LineTestParams, 256)
DEEP_EP_DECLARE_KERNEL(defect_no_lines, deep_ep::LineTestParams, 256)
