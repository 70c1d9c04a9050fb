// Metadata of received rows, as kernels are told of it.
#pragma once

#include "deep_ep/tensor.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep {

/// Of [N, K + 2] int32, columns of a row next to each other; `source_ends` says how many rows are valid.
RowMetadata row_metadata(const ConstTensorView& metadata, const ConstTensorView& source_ends, const Device& device);

}  // namespace deep_ep
