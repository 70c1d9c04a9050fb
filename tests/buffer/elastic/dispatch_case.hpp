// The second interface's dispatch of a case: its arguments, and what must come of it.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "deep_ep/elastic.hpp"
#include "tests/cluster/exchange.hpp"

namespace deep_ep::test {

struct ElasticKind {
  bool exact = true;
  bool expand = false;
  bool weights = true;
  bool stats = false;
  bool copy = false;
  bool column_major = false;
  bool each_selection = false;   ///< of combine, as the following
  bool combine_weights = false;  ///< not with each_selection
  /// Some rows have lost a selection's row, or name one that x does not have; and there are rows of a program's own, of
  /// no rank or of no token.
  bool gaps = false;
};

/// More than any rank has.
inline int most_tokens(const Case& one) { return static_cast<int>(one.shape.max_tokens()) + 3; }

inline ElasticDispatchArguments elastic_arguments(Rank& rank, const Case& one, const ElasticKind& kind) {
  const Inputs inputs = upload_inputs(rank, one);
  ElasticDispatchArguments arguments;
  arguments.x = inputs.dispatch.x;
  arguments.x_scales = inputs.dispatch.x_scales;
  arguments.topk_idx = inputs.topk_idx;
  if (kind.weights) arguments.topk_weights = inputs.dispatch.topk_weights;
  if (kind.stats) {
    arguments.stats = rank.upload(std::vector<std::int32_t>(std::size_t(one.shape.local_experts), 100), DType::int32,
                                  {one.shape.local_experts});
  }
  arguments.num_experts = one.shape.experts();
  arguments.max_tokens = most_tokens(one);
  arguments.expert_alignment = one.shape.alignment;
  arguments.exact = kind.exact;
  arguments.expand = arguments.zero_padding = kind.expand;
  arguments.column_major_scales = kind.column_major;
  arguments.copy_selections = kind.copy;
  return arguments;
}

/// `result` outlives the call.
inline ElasticDispatchArguments cached_arguments(const ElasticKind& kind, const ElasticDispatchArguments& fresh,
                                                 const ElasticDispatchResult& result) {
  ElasticDispatchArguments cached;
  cached.x = fresh.x;
  cached.x_scales = fresh.x_scales;
  cached.topk_weights = fresh.topk_weights;
  cached.handle = &result.handle;
  cached.topk_idx = fresh.topk_idx;
  cached.num_experts = fresh.num_experts;
  cached.max_tokens = fresh.max_tokens;
  cached.expert_alignment = fresh.expert_alignment;
  cached.expand = cached.zero_padding = kind.expand;
  cached.column_major_scales = kind.column_major;
  return cached;
}

/// What the case's rows are in the layout of the kind.
struct ElasticLayout {
  std::vector<std::int32_t> counts, ends;  ///< of experts
  std::vector<std::int32_t> slots;         ///< [rows, topk]
  std::vector<std::pair<std::int64_t, int>>
      row_of;  ///< of each row of the layout: received row and selection; -1: a gap
};

inline ElasticLayout layout_of(const Case& one, int rank, bool expand) {
  const auto& came = one.dispatched.received[std::size_t(rank)];
  const Shape& shape = one.shape;
  ElasticLayout layout;
  layout.slots.assign(came.topk_idx.size(), -1);
  const auto round_up = [&](std::int64_t value) {
    return (value + shape.alignment - 1) / shape.alignment * shape.alignment;
  };
  std::int64_t start = 0;
  for (int expert = 0; expert < shape.local_experts; ++expert) {
    std::int32_t count = 0;
    for (std::size_t at = 0; at < came.topk_idx.size(); ++at) {
      if (came.topk_idx[at] != expert) continue;
      if (expand) {
        layout.slots[at] = static_cast<std::int32_t>(start + count);
        layout.row_of.resize(std::size_t(start + count) + 1, {-1, 0});
        layout.row_of.back() = {std::int64_t(at) / shape.topk, int(std::int64_t(at) % shape.topk)};
      }
      ++count;
    }
    layout.counts.push_back(count);
    layout.ends.push_back(static_cast<std::int32_t>(start + (expand ? count : round_up(count))));
    start += round_up(count);
    if (expand) layout.row_of.resize(std::size_t(start), {-1, 0});
  }
  if (!expand) {
    for (std::int64_t row = 0; row < came.rows; ++row) layout.row_of.emplace_back(row, 0);
  }
  return layout;
}

/// The bytes of a tensor of any strides, row by row.
template <class T>
std::vector<T> rows_in_order(Rank& rank, const TensorView& tensor, std::int64_t rows) {
  TensorView memory = tensor;
  memory.shape = {tensor.size(1), tensor.stride(1)};
  memory.strides = {tensor.stride(1), 1};
  const bool turned = tensor.stride(0) == 1 && tensor.size(1) > 1;
  std::vector<T> all = rank.download<T>(turned ? memory : tensor), ordered;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < tensor.size(1); ++column) {
      ordered.push_back(all[std::size_t(turned ? column * tensor.stride(1) + row : row * tensor.size(1) + column)]);
    }
  }
  return ordered;
}

/// Rows, and what came beside them.
template <class Result>
void check_elastic_rows(Rank& rank, const Case& one, const ElasticKind& kind, const Result& result) {
  const auto& came = one.dispatched.received[std::size_t(rank.rank())];
  const Shape& shape = one.shape;
  const ElasticLayout layout = layout_of(one, rank.rank(), kind.expand);
  const auto bytes = static_cast<std::int64_t>(shape.row_bytes());
  std::vector<std::byte> x;
  std::vector<std::uint32_t> scales;
  std::vector<float> weights;
  for (const auto& [row, k] : layout.row_of) {
    for (std::int64_t i = 0; i < bytes; ++i) x.push_back(row < 0 ? std::byte{} : came.x[std::size_t(row * bytes + i)]);
    for (int i = 0; i < shape.scales; ++i) {
      scales.push_back(row < 0 ? 0 : came.scales[std::size_t(row * shape.scales + i)]);
    }
    weights.push_back(row < 0 ? 0 : came.topk_weights[std::size_t(row * shape.topk + k)]);
  }
  if (!kind.expand) weights = came.topk_weights;
  const auto rows = static_cast<std::int64_t>(layout.row_of.size());
  require(result.recv_x.size(0) >= rows, "recv_x: too few rows");
  std::vector<std::byte> there = rank.download<std::byte>(result.recv_x.view());
  there.resize(x.size());
  require_same(x, there, "recv_x", bytes);
  require(result.recv_x_scales.has_value() == (shape.scales > 0), "recv_x_scales");
  if (shape.scales > 0) {
    require_same(scales, rows_in_order<std::uint32_t>(rank, result.recv_x_scales->view(), rows), "recv_x_scales",
                 shape.scales);
    if (kind.column_major) {
      require(result.recv_x_scales->view().stride(0) == 1 || shape.scales == 0, "recv_x_scales: column-major");
    }
  }
  require(result.recv_topk_weights.has_value() == kind.weights, "recv_topk_weights");
  if (kind.weights) {
    std::vector<float> got = rank.download<float>(result.recv_topk_weights->view());
    got.resize(weights.size());
    require_same(weights, got, "recv_topk_weights", kind.expand ? 1 : shape.topk);
  }
  require(result.recv_topk_idx.has_value() == !kind.expand, "recv_topk_idx");
  if (kind.expand) return;
  const std::vector<std::int64_t> indices = rank.download_indices(result.recv_topk_idx->view());
  std::vector<std::int64_t> wanted = came.topk_idx;
  wanted.resize(indices.size(), -1);
  require_same(wanted, indices, "recv_topk_idx", shape.topk);
}

/// All that a fresh dispatch returns.
inline void check_elastic(Rank& rank, const Case& one, const ElasticKind& kind, const ElasticDispatchResult& result) {
  const int me = rank.rank();
  const auto& came = one.dispatched.received[std::size_t(me)];
  const Shape& shape = one.shape;
  const ElasticDispatchHandle& handle = result.handle;
  const ElasticLayout layout = layout_of(one, me, kind.expand);
  check_elastic_rows(rank, one, kind, result);
  const auto ints = [&](const Tensor& tensor) { return rank.download<std::int32_t>(tensor.view()); };
  require_same(layout.counts, ints(handle.expert_counts), "expert_counts");
  require_same(layout.ends, ints(handle.expert_ends), "expert_ends");
  require_same(kind.exact ? came.tokens_per_expert : std::vector<int>{}, result.num_recv_tokens_per_expert, "counts");
  require(!kind.exact || handle.metadata.size(0) == came.rows, "exact sizes");
  if (kind.exact && kind.expand)
    require(result.handle.num_expanded == std::int64_t(layout.row_of.size()), "num_expanded");

  std::vector<std::int32_t> ends(std::size_t(shape.ranks()), 0), metadata, local;
  for (std::int64_t row = 0; row < came.rows; ++row) {
    const std::int32_t source = came.src_rank[std::size_t(row)];
    for (std::int32_t rank_behind = source; rank_behind < shape.ranks(); ++rank_behind)
      ++ends[std::size_t(rank_behind)];
    metadata.push_back(source * most_tokens(one) + came.src_idx[std::size_t(row)]);
    int last = 0;
    for (int k = 0; k < shape.topk; ++k) {
      local.push_back(static_cast<std::int32_t>(came.topk_idx[std::size_t(row * shape.topk + k)]));
      if (local.back() >= 0) last = k;
    }
    metadata.push_back(source * shape.topk + last);
    for (int k = 0; k < shape.topk; ++k) metadata.push_back(layout.slots[std::size_t(row * shape.topk + k)]);
  }
  const auto valid = [&](const Tensor& tensor) {
    auto values = ints(tensor);
    values.resize(std::size_t(came.rows * tensor.size(1)));
    return values;
  };
  require_same(ends, ints(handle.source_ends), "source_ends");
  require_same(metadata, valid(handle.metadata), "metadata", shape.topk + 2);
  require_same(local, valid(handle.local_topk_idx), "local", shape.topk);

  const bool in_node = !handle.route.destination_row.defined();
  const auto& destinations = one.dispatched.destination_row[std::size_t(me)];
  std::vector<std::int32_t> own_rows;
  for (auto at = std::size_t(me); at < destinations.size(); at += std::size_t(shape.ranks())) {
    own_rows.insert(own_rows.end(), std::size_t(shape.topk), in_node ? destinations[at] : -1);
  }
  require_same(own_rows, ints(handle.own_rows), "own_rows", shape.topk);
  if (in_node) return;
  require_same(numbers_of_tokens(one, me), ints(handle.route.destination_row), "destination_row", shape.ranks());
}

}  // namespace deep_ep::test
