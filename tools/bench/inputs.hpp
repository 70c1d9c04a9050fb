// The inputs of one rank in normal mode.
#pragma once

#include <cstdint>
#include <vector>

#include "tools/bench/workload.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {

struct HostInputs {
  std::vector<std::uint16_t> bf16;
  std::vector<std::uint8_t> bits8;
  std::vector<float> scales;  ///< of the 8-bit rows
  std::vector<std::int64_t> selection;
  std::vector<float> weights;
};
HostInputs make_inputs(const WorkloadShape& shape, int rank);

/// The same where the calls read them.
struct RankInputs {
  RankInputs(Executor& executor, const WorkloadShape& shape, int rank, StreamHandle stream);

  /// Into the arguments of either kind of dispatch.
  template <class Arguments>
  void set_rows(Arguments& arguments, bool as_8bit) const {
    arguments.x = as_8bit ? x_8bit.view() : x_bf16.view();
    if (as_8bit) arguments.x_scales = scales.view();
  }

  DeviceTensor x_bf16, x_8bit, scales, selection, weights;
};

}  // namespace deep_ep::tools
