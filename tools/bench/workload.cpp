#include "tools/bench/workload.hpp"

#include <fmt/format.h>

#include <bit>
#include <cstring>
#include <numeric>
#include <utility>

#include "deep_ep/error.hpp"
#include "tools/common/number_formats.hpp"

namespace deep_ep::tools {
namespace {

constexpr std::uint64_t kSelectionSeed = 1;
constexpr std::uint64_t kRowSeed = 2;
constexpr std::uint64_t kScaleSeed = 3;

/// Eight bytes a step, cheap enough to compare gigabytes with.
class RowBytes {
 public:
  RowBytes(std::uint64_t seed, int rank, std::int64_t token)
      : state_(mix(mix(seed, static_cast<std::uint64_t>(rank)), static_cast<std::uint64_t>(token))) {}
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
    for (int i = 0; i < 256; ++i) values.push_back(float_to_bf16(static_cast<float>(i - 128)));
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
  for (float& scale : row) scale = to_unit(random.next());
}

Routes::Routes(const WorkloadShape& shape)
    : shape_(shape), rows_(static_cast<std::size_t>(shape.ranks) * static_cast<std::size_t>(shape.ranks)) {
  const auto topk = static_cast<std::size_t>(shape.topk);
  for (int source = 0; source < shape.ranks; ++source) {
    const std::vector<std::int64_t> selection = make_selection(shape, source);
    for (std::size_t begin = 0; begin < selection.size(); begin += topk) {
      std::uint64_t destinations = 0;
      for (std::size_t k = begin; k < begin + topk; ++k)
        destinations |= std::uint64_t{1} << (selection[k] / shape.local_experts());
      destinations_.push_back(destinations);
      for (int rank = 0; rank < shape.ranks; ++rank) {
        if ((destinations >> rank & 1u) != 0) ++rows_[index(source, rank)];
      }
    }
  }
}

std::int64_t Routes::received(int destination) const {
  std::int64_t count = 0;
  for (int source = 0; source < shape_.ranks; ++source) count += rows(source, destination);
  return count;
}

std::int64_t Routes::total() const { return std::accumulate(rows_.begin(), rows_.end(), std::int64_t{0}); }

std::int64_t Routes::total_between_ranks() const {
  std::int64_t count = total();
  for (int rank = 0; rank < shape_.ranks; ++rank) count -= rows(rank, rank);
  return count;
}

bool Routes::sends(int source, std::int64_t token, int destination) const {
  const auto at =
      static_cast<std::size_t>(source) * static_cast<std::size_t>(shape_.tokens) + static_cast<std::size_t>(token);
  return (destinations_[at] >> destination & 1u) != 0;
}

int Routes::fan_out(int source, std::int64_t token) const {
  const auto at =
      static_cast<std::size_t>(source) * static_cast<std::size_t>(shape_.tokens) + static_cast<std::size_t>(token);
  return std::popcount(destinations_[at]);
}

}  // namespace deep_ep::tools
