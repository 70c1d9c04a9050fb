// Compares what came back with what the oracle says.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "oracle/normal.hpp"
#include "tools/demo/model.hpp"

namespace deep_ep::tools {

/// How far a result is from the reference.
struct Difference {
  double largest = 0;           ///< absolute
  double largest_of_bound = 0;  ///< relative to what BF16 rounding explains: above 1 something is wrong
  std::int64_t differing = 0;   ///< of those elements or rows that must agree exactly
  std::string first;            ///< where the first one is
};

class Reference {
 public:
  /// One batch per rank; experts are shared out evenly, in order.
  Reference(const ModelShape& shape, std::span<const Batch> batches);

  int ranks() const { return static_cast<int>(batches_.size()); }
  int local_experts() const { return shape_.experts / ranks(); }
  int owner(std::int64_t expert) const { return static_cast<int>(expert) / local_experts(); }

  /// What rank `rank` must receive, without the rows' bytes.
  const oracle::Received& received(int rank) const { return routes_.received[static_cast<std::size_t>(rank)]; }
  /// Rows that `source` sends to `destination`.
  std::int64_t count(int source, int destination) const;
  /// (token, expert) pairs of each expert.
  std::vector<std::int64_t> expert_load() const;

  /// Compares received bytes of any kind ([rows, row_bytes]) with those of the sources ([tokens, row_bytes] each).
  Difference check_rows(int rank, const char* what, std::span<const std::byte> received,
                        std::span<const std::span<const std::byte>> sources, std::size_t row_bytes) const;
  /// Compares the received selections.
  Difference check_selection(int rank, std::span<const std::int64_t> local_experts,
                             std::span<const float> weights) const;
  /// Compares the layer's output [tokens, hidden] bfloat16 with the sum over the token's experts.
  Difference check_output(int rank, std::span<const std::uint16_t> output) const;

 private:
  const ModelShape& shape_;
  std::span<const Batch> batches_;
  oracle::Dispatched routes_;
};

}  // namespace deep_ep::tools
