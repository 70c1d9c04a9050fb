#include "tools/demo/model.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "oracle/bf16.hpp"
#include "oracle/random.hpp"

namespace deep_ep::tools {
namespace {

using oracle::bf16_bits;
using oracle::bf16_value;
using oracle::to_signed_unit;

constexpr std::uint64_t kEmbeddingSeed = 0xe3bedd1;
constexpr std::uint64_t kGateSeed = 0x6a7e;
constexpr std::uint64_t kExpertSeed = 0xe8be27;
constexpr int kGateChannels = 256;  // the gate looks at the first channels only: enough to tell words apart

bool is_word_byte(unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c >= 0x80; }

std::uint64_t hash_word(std::string_view word) {
  std::uint64_t hash = kEmbeddingSeed;
  for (const char c : word) hash = oracle::hash(hash, static_cast<unsigned char>(c));
  return hash;
}

/// The gate's table: a row of weights for every expert, and how popular the expert is before it sees a token.
/// Real gates are skewed: a few experts of every layer get several times the average load.
struct Gate {
  explicit Gate(const ModelShape& shape) : channels(std::min(shape.hidden, kGateChannels)) {
    const auto width = static_cast<std::size_t>(channels);
    table.resize(static_cast<std::size_t>(shape.experts) * width);
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = to_signed_unit(oracle::hash(kGateSeed, i));
    for (int e = 0; e < shape.experts; ++e) {
      const float u = to_signed_unit(oracle::hash(kGateSeed + 1, static_cast<std::uint64_t>(e)));
      popularity.push_back(0.9f * u * u * u);
    }
  }

  float logit(const std::uint16_t* x, int expert) const {
    const float* row = table.data() + static_cast<std::size_t>(expert) * static_cast<std::size_t>(channels);
    float sum = 0;
    for (int c = 0; c < channels; ++c) sum += row[c] * bf16_value(x[c]);
    // Entries of x and of the table have a variance of about 1/3 each.
    return 2.0f * sum / std::sqrt(static_cast<float>(channels)) + popularity[static_cast<std::size_t>(expert)];
  }

  int channels;
  std::vector<float> table;
  std::vector<float> popularity;
};

/// Indices of the `count` largest values, the largest first; the smaller index wins a tie.
std::vector<int> best(std::span<const float> values, int count) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int a, int b) {
    const float left = values[static_cast<std::size_t>(a)];
    const float right = values[static_cast<std::size_t>(b)];
    return left > right || (left == right && a < b);
  });
  order.resize(static_cast<std::size_t>(count));
  return order;
}

void route(const ModelShape& shape, const Gate& gate, const std::uint16_t* x, std::int64_t* experts, float* weights) {
  std::vector<float> scores(static_cast<std::size_t>(shape.experts));
  for (int e = 0; e < shape.experts; ++e) {
    scores[static_cast<std::size_t>(e)] = 1.0f / (1.0f + std::exp(-gate.logit(x, e)));
  }

  // 1. A group is worth the sum of its two best experts; the best groups stay.
  const auto group_size = static_cast<std::size_t>(shape.experts / shape.groups);
  std::vector<float> group_scores;
  for (int g = 0; g < shape.groups; ++g) {
    const auto group = std::span(scores).subspan(static_cast<std::size_t>(g) * group_size, group_size);
    float score = 0;
    for (const int e : best(group, std::min<int>(2, static_cast<int>(group_size))))
      score += group[static_cast<std::size_t>(e)];
    group_scores.push_back(score);
  }
  std::vector<float> allowed(scores.size(), -1.0f);
  for (const int g : best(group_scores, shape.used_groups)) {
    const auto begin = static_cast<std::size_t>(g) * group_size;
    std::copy_n(scores.begin() + static_cast<std::ptrdiff_t>(begin), group_size,
                allowed.begin() + static_cast<std::ptrdiff_t>(begin));
  }

  // 2. The best experts in them, their scores normalised.
  const std::vector<int> chosen = best(allowed, shape.topk);
  float sum = 0;
  for (const int e : chosen) sum += scores[static_cast<std::size_t>(e)];
  for (std::size_t k = 0; k < chosen.size(); ++k) {
    experts[k] = chosen[k];
    weights[k] = shape.scaling * scores[static_cast<std::size_t>(chosen[k])] / sum;
  }
}

}  // namespace

std::vector<std::string> split_words(std::string_view text) {
  std::vector<std::string> words;
  for (std::size_t i = 0; i < text.size();) {
    std::size_t end = i;
    while (end < text.size() && is_word_byte(static_cast<unsigned char>(text[end]))) ++end;
    if (end == i) {
      if (std::ispunct(static_cast<unsigned char>(text[i])) != 0) words.emplace_back(1, text[i]);
      ++i;
    } else {
      words.emplace_back(text.substr(i, end - i));
      i = end;
    }
  }
  return words;
}

Batch make_batch(const ModelShape& shape, std::span<const std::string> words, std::string_view previous) {
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  const auto topk = static_cast<std::size_t>(shape.topk);
  const Gate gate(shape);
  Batch batch;
  batch.tokens = static_cast<std::int64_t>(words.size());
  batch.x.resize(words.size() * hidden);
  batch.experts.resize(words.size() * topk);
  batch.weights.resize(words.size() * topk);
  std::uint64_t before = hash_word(previous);
  for (std::size_t t = 0; t < words.size(); ++t) {
    const std::uint64_t word = hash_word(words[t]);
    std::uint16_t* row = batch.x.data() + t * hidden;
    for (std::size_t h = 0; h < hidden; ++h) {
      row[h] = bf16_bits(to_signed_unit(oracle::hash(word ^ h)) + 0.5f * to_signed_unit(oracle::hash(before ^ h)));
    }
    route(shape, gate, row, batch.experts.data() + t * topk, batch.weights.data() + t * topk);
    before = word;
  }
  return batch;
}

float expert_scale(int expert) {
  // Either sign, and never near zero, so that an expert left out is noticed.
  const float u = to_signed_unit(oracle::hash(kExpertSeed, static_cast<std::uint64_t>(expert)));
  return bf16_value(bf16_bits(u < 0 ? u - 0.5f : u + 0.5f));
}

void apply_expert(int expert, std::span<const std::uint16_t> x, std::span<std::uint16_t> output) {
  const float scale = expert_scale(expert);
  for (std::size_t h = 0; h < x.size(); ++h) output[h] = bf16_bits(scale * bf16_value(x[h]));
}

void apply_experts(const ModelShape& shape, int first_expert, std::span<std::uint16_t> rows,
                   std::span<const std::int64_t> local_experts, std::span<const float> weights) {
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  const auto topk = static_cast<std::size_t>(shape.topk);
  std::vector<float> sum(hidden);
  std::vector<std::uint16_t> output(hidden);
  for (std::size_t row = 0; row * hidden < rows.size(); ++row) {
    const auto x = rows.subspan(row * hidden, hidden);
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (std::size_t k = row * topk; k < (row + 1) * topk; ++k) {
      if (local_experts[k] < 0) continue;
      apply_expert(first_expert + static_cast<int>(local_experts[k]), x, output);
      for (std::size_t h = 0; h < hidden; ++h) sum[h] += weights[k] * bf16_value(output[h]);
    }
    for (std::size_t h = 0; h < hidden; ++h) x[h] = bf16_bits(sum[h]);
  }
}

}  // namespace deep_ep::tools
