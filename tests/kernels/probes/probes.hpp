// Kernels that exercise every primitive and record the results; primitives_test.cpp knows what they must be.
#pragma once

#include "kernels/primitives/cell.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/target.hpp"

namespace deep_ep::probes {

/// What one lane got from the warp operations. Lane i gives values that depend on i only; see warp_probe.cu.
struct WarpResult {
  std::uint8_t shuffled8;
  std::uint16_t shuffled16;
  std::uint32_t shuffled32;
  std::uint64_t shuffled64;
  device::Vec16 shuffled128;
  float shuffled_up;
  std::int32_t shuffled_xor;
  std::uint32_t ballot;
  std::uint32_t flags;  ///< bit 0 any, 1 not any, 2 all, 3 not all
  std::int32_t sum;
  std::uint64_t sum64;
  float float_sum;
  std::int32_t max;
  std::int32_t min;
  float float_max;
  std::int64_t min64;
  std::int32_t inclusive_sum;
  std::uint32_t match;
};
struct WarpParams {
  WarpResult* results;  ///< one per thread
};

struct BarrierParams {
  int rounds;
  std::uint32_t* sums;  ///< one per thread: the sum of what it read from others
};

struct MemoryParams {
  std::uint64_t* counter;    ///< [3]
  std::uint32_t* counter32;  ///< [3]
  std::int64_t* order;       ///< [2]
  const device::Vec16* source;
  device::Vec16* destination;  ///< one per thread of the grid
};

struct BulkParams {
  int rows;
  int row_bytes;
  const std::byte* source;
  std::byte* destination;  ///< every byte of source plus one
};

/// Block 0 sends cells to block 1, `rounds` times through the same ones.
struct CellParams {
  int rounds;
  Cell* cells;             ///< [32]
  std::uint64_t* read;     ///< [1]: rounds that block 1 has read
  std::uint64_t* results;  ///< [32]: what was received, each round times its number, summed
};

struct LineParams {
  int rounds;
  int lines;               ///< of a row
  std::byte* row;          ///< in memory of the device
  std::uint64_t* read;     ///< [1]: warps of block 1 that have read, all rounds
  std::uint64_t* results;  ///< [1]: words that were not what was sent
};

struct NumericParams {
  int count;
  const float* values;
  std::uint16_t* bf16;   ///< [count]
  std::uint32_t* pairs;  ///< [count / 2]
  float* back;           ///< [count], from the pairs
};

}  // namespace deep_ep::probes

DEEP_EP_DECLARE_KERNEL(warp_probe, deep_ep::probes::WarpParams, 256)
DEEP_EP_DECLARE_KERNEL(barrier_probe, deep_ep::probes::BarrierParams, 256)
DEEP_EP_DECLARE_KERNEL(memory_probe, deep_ep::probes::MemoryParams, 256)
DEEP_EP_DECLARE_KERNEL(bulk_probe, deep_ep::probes::BulkParams, 256)
DEEP_EP_DECLARE_KERNEL(cell_probe, deep_ep::probes::CellParams, 32)
DEEP_EP_DECLARE_KERNEL(line_probe, deep_ep::probes::LineParams, 512)
DEEP_EP_DECLARE_KERNEL(numeric_probe, deep_ep::probes::NumericParams, 256)
