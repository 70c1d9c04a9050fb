#include "tools/bench/workload.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "csrc/support/format.hpp"
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

void check_workload(int ranks, int topk, int experts, int nodes, int groups) {
  if (ranks > 64) fail<InvalidArgument>("--ranks {}: allowed: 1 to 64", ranks);
  if (experts % ranks != 0) fail<InvalidArgument>("--experts {}: must be a multiple of the {} ranks", experts, ranks);
  if (topk > experts) {
    fail<InvalidArgument>("--topk {}: a token has that many different ones of {} experts", topk, experts);
  }
  if (nodes > ranks || ranks % nodes != 0) fail<InvalidArgument>("--nodes {}: must divide the {} ranks", nodes, ranks);
  if (groups > nodes) fail<InvalidArgument>("--groups {}: allowed: at most the {} nodes", groups, nodes);
  if (groups != 0 && topk > experts / nodes * groups) {
    fail<InvalidArgument>("--topk {}: {} of the {} nodes have only {} of the {} experts", topk, groups, nodes,
                          experts / nodes * groups, experts);
  }
}

std::vector<std::int64_t> make_selection(const WorkloadShape& shape, int rank) {
  const auto topk = static_cast<std::size_t>(shape.topk);
  std::vector<std::int64_t> selection;
  selection.reserve(static_cast<std::size_t>(shape.tokens) * topk);
  std::vector<std::int64_t> experts(static_cast<std::size_t>(shape.experts));
  std::iota(experts.begin(), experts.end(), 0);
  RowBytes random(kSelectionSeed, rank, 0);
  const auto choose = [&](std::vector<std::int64_t>& of, std::size_t count) {
    for (std::size_t k = 0; k < count; ++k) std::swap(of[k], of[k + (random.next() >> 16) % (of.size() - k)]);
  };
  std::vector<std::int64_t> nodes(static_cast<std::size_t>(shape.nodes));
  std::iota(nodes.begin(), nodes.end(), 0);
  const auto per_node = static_cast<std::size_t>(shape.experts / shape.nodes);
  for (std::int64_t token = 0; token < shape.tokens; ++token) {
    if (shape.groups != 0) {
      choose(nodes, static_cast<std::size_t>(shape.groups));
      experts.resize(per_node * static_cast<std::size_t>(shape.groups));
      for (std::size_t i = 0; i < experts.size(); ++i) {
        experts[i] =
            nodes[i / per_node] * static_cast<std::int64_t>(per_node) + static_cast<std::int64_t>(i % per_node);
      }
    }
    choose(experts, topk);
    selection.insert(selection.end(), experts.begin(), experts.begin() + shape.topk);
  }
  return selection;
}

std::vector<float> make_weights(const WorkloadShape& shape, int rank) {
  std::vector<float> weights(static_cast<std::size_t>(shape.tokens * shape.topk));
  for (std::size_t i = 0; i < weights.size(); ++i) {
    weights[i] = static_cast<float>(1 + (i + static_cast<std::size_t>(rank)) % 7) / 8;
  }
  return weights;
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

Routes::Routes(const WorkloadShape& shape, bool with_selections) : shape_(shape) {
  std::vector<oracle::DispatchInput> inputs;  // without rows: where they go is all that is asked
  for (int source = 0; source < shape.ranks; ++source) {
    oracle::DispatchInput input;
    input.tokens = shape.tokens;
    oracle::Selection selection{shape.tokens, shape.topk, make_selection(shape, source), make_weights(shape, source)};
    input.layout = oracle::layout(selection, shape.ranks, shape.experts);
    if (with_selections) input.selection = std::move(selection);
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

std::span<const std::int32_t> Routes::rows_on_node(int source, std::int64_t token, int node) const {
  const int width = shape_.ranks_per_node();
  return std::span(dispatched_.destination_row[static_cast<std::size_t>(source)])
      .subspan(static_cast<std::size_t>(token * shape_.ranks + node * width), static_cast<std::size_t>(width));
}

int Routes::fan_out(int source, std::int64_t token, int node) const {
  return static_cast<int>(
      std::ranges::count_if(rows_on_node(source, token, node), [](std::int32_t row) { return row >= 0; }));
}

Routes::Crossings Routes::crossings() const {
  Crossings all;
  for (int source = 0; source < shape_.ranks; ++source) {
    const int index = source % shape_.ranks_per_node();  // in the source's own node, and of its rails
    for (std::int64_t token = 0; token < shape_.tokens; ++token) {
      for (int node = 0; node < shape_.nodes; ++node) {
        const int rows = fan_out(source, token, node);
        if (rows == 0) continue;
        const bool to_holder = rows_on_node(source, token, node)[static_cast<std::size_t>(index)] >= 0;
        all.over_nvlink += rows - (to_holder ? 1 : 0);
        all.between_nodes += node != source / shape_.ranks_per_node() ? 1 : 0;
        ++all.to_nodes;
      }
    }
  }
  return all;
}

}  // namespace deep_ep::tools
