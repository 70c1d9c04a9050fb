#include "bench_support/workload.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "deep_ep/error.hpp"
#include "oracle/bf16.hpp"
#include "oracle/random.hpp"

namespace deep_ep::tools {
namespace {

constexpr std::uint64_t kSelectionSeed = 1;
constexpr std::uint64_t kRowSeed = 2;
constexpr std::uint64_t kScaleSeed = 3;

/// Eight bytes per step: cheap enough to compare gigabytes.
class RowBytes {
 public:
  RowBytes(std::uint64_t seed, int rank, std::int64_t token)
      : state_(oracle::hash(oracle::hash(seed, static_cast<std::uint64_t>(rank)), static_cast<std::uint64_t>(token))) {}
  std::uint64_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return state_ ^ (state_ >> 29);
  }

 private:
  std::uint64_t state_;
};

}  // namespace

void check_workload(int ranks, int topk, int experts) {
  if (ranks > 64) throw InvalidArgument(fmt::format("--ranks {}: allowed: 1 to 64", ranks));
  if (experts % ranks != 0) {
    throw InvalidArgument(fmt::format("--experts {}: must be a multiple of the {} ranks", experts, ranks));
  }
  if (topk > experts) {
    throw InvalidArgument(fmt::format("--topk {}: a token has that many different ones of {} experts", topk, experts));
  }
}

std::vector<std::int64_t> make_selection(const WorkloadShape& shape, int rank) {
  const auto topk = static_cast<std::size_t>(shape.topk);
  std::vector<std::int64_t> selection;
  selection.reserve(static_cast<std::size_t>(shape.tokens) * topk);
  std::vector<std::int64_t> experts(static_cast<std::size_t>(shape.experts));
  std::iota(experts.begin(), experts.end(), 0);
  RowBytes random(kSelectionSeed, rank, 0);
  for (std::int64_t token = 0; token < shape.tokens; ++token) {
    for (std::size_t k = 0; k < topk; ++k) {
      const std::size_t other = k + (random.next() >> 16) % (experts.size() - k);
      std::swap(experts[k], experts[other]);
      selection.push_back(experts[k]);
    }
  }
  return selection;
}

void fill_row_bf16(int rank, std::int64_t token, std::span<std::uint16_t> row) {
  // Whole numbers from -128 to 127, each an entry of a table of their BF16 forms.
  static const std::vector<std::uint16_t> table = [] {
    std::vector<std::uint16_t> values;
    for (int i = 0; i < 256; ++i) values.push_back(oracle::bf16_bits(static_cast<float>(i - 128)));
    return values;
  }();
  RowBytes random(kRowSeed, rank, token);
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < row.size(); ++i) {
    bytes = i % 8 == 0 ? random.next() : bytes >> 8;
    row[i] = table[bytes & 0xff];
  }
}

void fill_row_8bit(int rank, std::int64_t token, std::span<std::uint8_t> row) {
  RowBytes random(kRowSeed, rank, token);
  for (std::size_t i = 0; i < row.size(); i += 8) {
    const std::uint64_t bytes = random.next();
    std::memcpy(row.data() + i, &bytes, std::min<std::size_t>(8, row.size() - i));
  }
}

void fill_scales(int rank, std::int64_t token, std::span<float> row) {
  RowBytes random(kScaleSeed, rank, token);
  for (float& scale : row) scale = oracle::to_signed_unit(random.next());
}

Routes::Routes(const WorkloadShape& shape) : shape_(shape) {
  std::vector<oracle::DispatchInput> inputs;  // without rows: where they go is all that is asked
  for (int source = 0; source < shape.ranks; ++source) {
    oracle::DispatchInput input;
    input.tokens = shape.tokens;
    input.layout =
        oracle::layout({shape.tokens, shape.topk, make_selection(shape, source), {}}, shape.ranks, shape.experts);
    inputs.push_back(std::move(input));
  }
  dispatched_ = oracle::dispatch(inputs, shape.experts, 1);
}

std::int64_t Routes::rows(int source, int destination) const {
  const auto ranks = static_cast<std::size_t>(shape_.ranks);
  const auto at = static_cast<std::size_t>(source) * ranks + static_cast<std::size_t>(destination);
  const std::vector<std::int32_t>& ends = dispatched_.rank_prefix_matrix;
  return ends[at] - (source == 0 ? 0 : ends[at - ranks]);
}

std::int64_t Routes::total() const {
  std::int64_t count = 0;
  for (const oracle::Received& received : dispatched_.received) count += received.rows;
  return count;
}

std::int64_t Routes::total_between_ranks() const {
  std::int64_t count = total();
  for (int rank = 0; rank < shape_.ranks; ++rank) count -= rows(rank, rank);
  return count;
}

int Routes::fan_out(int source, std::int64_t token) const {
  const auto ranks = static_cast<std::size_t>(shape_.ranks);
  const auto rows = std::span(dispatched_.destination_row[static_cast<std::size_t>(source)])
                        .subspan(static_cast<std::size_t>(token) * ranks, ranks);
  return static_cast<int>(std::ranges::count_if(rows, [](std::int32_t row) { return row >= 0; }));
}

}  // namespace deep_ep::tools
