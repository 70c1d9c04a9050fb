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
constexpr std::size_t kGateChannels = 256;  // the gate looks at the first ones only: enough to tell words apart

bool is_word_byte(unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c >= 0x80; }

std::uint64_t hash_word(std::string_view word) {
  std::uint64_t hash = kEmbeddingSeed;
  for (const char c : word) hash = oracle::hash(hash, static_cast<unsigned char>(c));
  return hash;
}

/// Chooses the experts of a row. A gate weighs the row's channels for every expert; the best scores, normalised, are
/// the weights.
void route(const ModelShape& shape, std::span<const float> gate, const std::uint16_t* x, std::int64_t* experts,
           float* weights) {
  const std::size_t channels = gate.size() / static_cast<std::size_t>(shape.experts);
  std::vector<float> scores;
  for (std::size_t at = 0; at < gate.size(); at += channels) {
    float sum = 0;
    for (std::size_t c = 0; c < channels; ++c) sum += gate[at + c] * bf16_value(x[c]);
    // Entries of x and of the gate have a variance of about 1/3 each.
    scores.push_back(1.0f / (1.0f + std::exp(-2.0f * sum / std::sqrt(static_cast<float>(channels)))));
  }
  const auto score = [&](std::int64_t expert) { return scores[static_cast<std::size_t>(expert)]; };
  std::vector<std::int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + shape.topk, order.end(), [&](std::int64_t a, std::int64_t b) {
    return score(a) > score(b) || (score(a) == score(b) && a < b);
  });
  float sum = 0;
  for (int k = 0; k < shape.topk; ++k) sum += score(experts[k] = order[static_cast<std::size_t>(k)]);
  for (int k = 0; k < shape.topk; ++k) weights[k] = score(experts[k]) / sum;
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

Batch make_batch(const ModelShape& shape, std::span<const std::string> words, std::size_t begin, std::size_t end) {
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  const auto topk = static_cast<std::size_t>(shape.topk);
  std::vector<float> gate(static_cast<std::size_t>(shape.experts) * std::min(hidden, kGateChannels));
  for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = to_signed_unit(oracle::hash(kGateSeed, i));
  Batch batch;
  batch.tokens = static_cast<std::int64_t>(end - begin);
  batch.x.resize((end - begin) * hidden);
  batch.experts.resize((end - begin) * topk);
  batch.weights.resize((end - begin) * topk);
  for (std::size_t t = 0; t < end - begin; ++t) {
    const std::uint64_t word = hash_word(words[begin + t]);
    const std::uint64_t before = hash_word(begin + t == 0 ? std::string_view() : words[begin + t - 1]);
    std::uint16_t* row = batch.x.data() + t * hidden;
    for (std::size_t h = 0; h < hidden; ++h) {
      row[h] = bf16_bits(to_signed_unit(oracle::hash(word ^ h)) + 0.5f * to_signed_unit(oracle::hash(before ^ h)));
    }
    route(shape, gate, row, batch.experts.data() + t * topk, batch.weights.data() + t * topk);
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
