// One round of a layer, for all ranks: what goes in, and what the oracle says must come out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "deep_ep/tensor.hpp"
#include "oracle/normal.hpp"
#include "oracle/random.hpp"
#include "oracle/routing.hpp"

namespace deep_ep::test {

/// How the scales of a rank's tokens lie in memory.
enum class ScaleLayout : std::uint8_t {
  row_major,
  column_major,
  padded,       ///< row-major, rows further apart than their length
  every_third,  ///< both strides larger than needed
};
inline constexpr ScaleLayout kScaleLayouts[] = {ScaleLayout::row_major, ScaleLayout::column_major, ScaleLayout::padded,
                                                ScaleLayout::every_third};

struct Shape {
  std::vector<std::int64_t> tokens = {16, 16};  ///< one entry per rank
  int local_experts = 4;
  int topk = 4;
  bool with_topk = true;  ///< hand the top-k tensors to dispatch (they make the layout in any case)
  DType idx_dtype = DType::int64;
  oracle::Routing routing = oracle::Routing::uniform;
  DType dtype = DType::bfloat16;
  std::int64_t hidden = 64;
  int scales = 0;
  DType scale_dtype = DType::float32;
  ScaleLayout scale_layout = ScaleLayout::row_major;
  int alignment = 1;
  std::int64_t combine_hidden = 64;
  bool combine_weights = true;  ///< only where with_topk
  bool bias_0 = false;
  bool bias_1 = false;
  int ranks_per_node = 0;  ///< 0: one node
  std::uint64_t seed = 1;

  int ranks() const { return static_cast<int>(tokens.size()); }
  int experts() const { return ranks() * local_experts; }
  int nodes() const { return ranks_per_node == 0 ? 1 : ranks() / ranks_per_node; }
  std::size_t row_bytes() const { return static_cast<std::size_t>(hidden) * size_of(dtype); }
  std::int64_t max_tokens() const;
  std::string describe() const;
};

struct Case {
  Shape shape;
  std::vector<oracle::Selection> selections;  ///< one per rank, whether or not dispatch is told
  std::vector<oracle::DispatchInput> inputs;
  oracle::Dispatched dispatched;
  std::vector<oracle::CombineInput> returned;
  std::vector<oracle::Combined> combined;

  std::int64_t rows(int rank) const { return dispatched.received[static_cast<std::size_t>(rank)].rows; }
};

Case make_case(const Shape& shape);
/// The same tokens and routing, where `membership` (one per rank, [tokens, ranks]) instead of the top-k decides who
/// gets a row.
Case make_case(const Shape& shape, const std::vector<std::vector<std::uint8_t>>& membership);

/// Anything that a call may bring.
Shape random_shape(oracle::Random& random, int ranks);
/// And what only nodes can bring: experts of some nodes only, nodes without tokens.
Shape random_shape_of_nodes(oracle::Random& random, int nodes, int width);

/// The same number of tokens everywhere.
std::vector<std::int64_t> equal_tokens(int ranks, std::int64_t tokens);

/// bfloat16 bits of numbers up to 32, of several powers of two. Most sums of them are exact in fp32.
std::vector<std::uint16_t> random_bf16(std::int64_t elements, std::uint64_t seed);
/// bfloat16 bits for sums that depend on the order: beside +-2^24 small numbers lose bits, and +-2^24 may cancel.
std::vector<std::uint16_t> random_terms(std::int64_t elements, std::uint64_t seed);

}  // namespace deep_ep::test
