// A Mixture-of-Experts layer over the words of a text. All its tables are made from fixed seeds, so that every run
// routes the same text the same way.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace deep_ep::tools {

/// As in DeepSeek-V3.
struct ModelShape {
  int hidden = 7168;
  int experts = 256;
  int topk = 8;
};

/// Words (runs of letters, digits, '_' and bytes beyond ASCII) and single punctuation marks, in order.
std::vector<std::string> split_words(std::string_view text);

/// The tokens of one rank.
struct Batch {
  std::int64_t tokens = 0;
  std::vector<std::uint16_t> x;       ///< [tokens, hidden] bfloat16
  std::vector<std::int64_t> experts;  ///< [tokens, topk]
  std::vector<float> weights;         ///< [tokens, topk], whose sum is 1 for each token
};

/// Embeds words `begin` to `end` and routes them. A token is its word's embedding plus a share of the word's before it,
/// so that the same word may go different ways.
Batch make_batch(const ModelShape& shape, std::span<const std::string> words, std::size_t begin, std::size_t end);

/// The factor by which expert `expert` multiplies its input.
float expert_scale(int expert);

/// An expert's output is BF16, as a real one's is.
void apply_expert(int expert, std::span<const std::uint16_t> x, std::span<std::uint16_t> output);

/// The experts of one rank: turns the received rows into the weighted sum of its experts' outputs, in place.
/// `local_experts` counts from the rank's first expert, -1 = another rank's.
void apply_experts(const ModelShape& shape, int first_expert, std::span<std::uint16_t> rows,
                   std::span<const std::int64_t> local_experts, std::span<const float> weights);

}  // namespace deep_ep::tools
