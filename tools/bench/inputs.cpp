#include "tools/bench/inputs.hpp"

#include <span>

namespace deep_ep::tools {

HostInputs make_inputs(const WorkloadShape& shape, int rank) {
  const auto tokens = static_cast<std::size_t>(shape.tokens);
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  const auto blocks = static_cast<std::size_t>(shape.scales());
  const auto topk = static_cast<std::size_t>(shape.topk);
  HostInputs inputs{.bf16 = std::vector<std::uint16_t>(tokens * hidden),
                    .bits8 = std::vector<std::uint8_t>(tokens * hidden),
                    .scales = std::vector<float>(tokens * blocks),
                    .selection = make_selection(shape, rank),
                    .weights = std::vector<float>(tokens * topk)};
  for (std::size_t token = 0; token < tokens; ++token) {
    const auto at = static_cast<std::int64_t>(token);
    fill_row_bf16(rank, at, std::span(inputs.bf16).subspan(token * hidden, hidden));
    fill_row_8bit(rank, at, std::span(inputs.bits8).subspan(token * hidden, hidden));
    fill_scales(rank, at, std::span(inputs.scales).subspan(token * blocks, blocks));
  }
  for (std::size_t i = 0; i < inputs.weights.size(); ++i) {
    inputs.weights[i] = static_cast<float>(1 + (i + static_cast<std::size_t>(rank)) % 7) / 8;
  }
  return inputs;
}

RankInputs::RankInputs(Executor& executor, const WorkloadShape& shape, int rank, StreamHandle stream)
    : x_bf16(executor, DType::bfloat16, {shape.tokens, shape.hidden}),
      x_8bit(executor, DType::float8_e4m3, {shape.tokens, shape.hidden}),
      scales(executor, DType::float32, {shape.tokens, shape.scales()}),
      selection(executor, DType::int64, {shape.tokens, shape.topk}),
      weights(executor, DType::float32, {shape.tokens, shape.topk}) {
  const HostInputs inputs = make_inputs(shape, rank);
  x_bf16.upload(inputs.bf16.data(), stream);
  x_8bit.upload(inputs.bits8.data(), stream);
  scales.upload(inputs.scales.data(), stream);
  selection.upload(inputs.selection.data(), stream);
  weights.upload(inputs.weights.data(), stream);
}

}  // namespace deep_ep::tools
