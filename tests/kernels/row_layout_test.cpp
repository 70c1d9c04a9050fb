// deep_ep/row_layout.hpp on every executor present, against plain loops.
#include "deep_ep/row_layout.hpp"

#include <bit>
#include <random>

#include "csrc/executor/backend.hpp"
#include "kernels/rows/params.hpp"
#include "tests/kernels/on_device.hpp"
#include "tests/kernels/test_kernel.hpp"

namespace deep_ep::test {
namespace {

using Ints = std::vector<std::int32_t>;
constexpr std::int32_t kUntouched = -77;

/// A rank's received rows, and what must be known of them. Rows from `valid` on hold anything.
struct Received {
  std::int64_t rows, valid, tokens, topk;
  int ranks, rank, experts, max_tokens, alignment;
  std::vector<std::int64_t> recv_topk_idx, topk_idx;
  Ints source_token, prefix, destination_row;
  // Expected.
  Ints ends, counts, starts, metadata, local, at_owners;
  std::int64_t expanded = 0;  ///< rows of that layout

  /// `lost`: rows that were sent besides, and had no room.
  Received(std::int64_t rows, std::int64_t valid, std::int64_t topk, int ranks, int experts, int alignment,
           std::int64_t lost = 0)
      : rows(rows),
        valid(valid),
        tokens(valid / 2),
        topk(topk),
        ranks(ranks),
        rank(ranks / 2),
        experts(experts),
        max_tokens(static_cast<int>(rows + 1)),
        alignment(alignment) {
    std::mt19937_64 random(static_cast<std::uint64_t>(rows * 31 + topk));
    const auto below = [&](std::int64_t end) { return static_cast<std::int64_t>(random() % std::uint64_t(end)); };
    for (std::int64_t i = 0; i < rows * topk; ++i) recv_topk_idx.push_back(below(experts + 2) - 2);
    for (std::int64_t i = 0; i < tokens * topk; ++i) topk_idx.push_back(below(std::int64_t{experts} * ranks + 2) - 2);
    for (std::int64_t i = 0; i < rows; ++i) source_token.push_back(static_cast<std::int32_t>(below(max_tokens)));
    for (std::int64_t i = 0; i < tokens * ranks; ++i) destination_row.push_back(static_cast<std::int32_t>(below(1000)));
    prefix.assign(static_cast<std::size_t>(ranks * ranks), kUntouched);
    for (int source = 0; source < ranks; ++source) {
      const std::int64_t end = (valid + lost) * (source + 1) * (source + 1) / ranks / ranks;
      ends.push_back(static_cast<std::int32_t>(std::min(end, rows)));
      prefix[static_cast<std::size_t>(source * ranks + rank)] = static_cast<std::int32_t>(end);
    }
    expect();
  }

  std::int64_t selected(std::int64_t row, std::int64_t k) const {
    return row < valid ? recv_topk_idx[static_cast<std::size_t>(row * topk + k)] : -1;
  }
  std::int32_t& slot(std::int64_t row, std::int64_t k) {
    return metadata[static_cast<std::size_t>(row * (topk + 2) + 2 + k)];
  }

  void expect() {
    metadata.assign(static_cast<std::size_t>(rows * (topk + 2)), -1);
    for (int expert = 0; expert < experts; ++expert) {
      starts.push_back(static_cast<std::int32_t>(expanded));
      for (std::int64_t row = 0; row < valid; ++row) {
        for (std::int64_t k = 0; k < topk; ++k) {
          if (selected(row, k) == expert) slot(row, k) = static_cast<std::int32_t>(expanded++);
        }
      }
      counts.push_back(static_cast<std::int32_t>(expanded) - starts.back());
      expanded = (expanded + alignment - 1) / alignment * alignment;
    }
    int source = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t k = 0; k < topk; ++k)
        local.push_back(static_cast<std::int32_t>(std::max<std::int64_t>(selected(row, k), -1)));
      if (row >= valid) continue;
      while (row >= ends[static_cast<std::size_t>(source)]) ++source;
      int last = 0;
      for (int k = 0; k < topk; ++k) last = selected(row, k) >= 0 ? k : last;
      slot(row, -2) = source * max_tokens + source_token[static_cast<std::size_t>(row)];
      slot(row, -1) = source * static_cast<int>(topk) + last;
    }
    for (std::int64_t i = 0; i < tokens * topk; ++i) {
      const std::int64_t index = topk_idx[static_cast<std::size_t>(i)];
      at_owners.push_back(index < 0 ? -1
                                    : destination_row[static_cast<std::size_t>(i / topk * ranks + index / experts)]);
    }
  }
};

TEST(NumberRows, ByExpertThenRowThenSelection) {
  for (const auto& executor : executors_present(2)) {
    for (const Received& want :
         {Received(700, 700, 4, 3, 5, 8), Received(300, 171, 9, 2, 40, 1), Received(5, 0, 2, 1, 3, 4),
          Received(0, 0, 4, 2, 2, 1), Received(33, 20, 1, 4, 70, 16), Received(40, 40, 2, 3, 4, 1, 9),
          Received(4100, 4051, 4, 3, 37, 8)}) {  // the last: so many that a kernel counts beforehand
      for (const bool expand : {false, true}) {
        SCOPED_TRACE(std::to_string(want.rows) + " rows, expand " + std::to_string(expand));
        const OnDevice<std::int64_t> recv_idx(*executor, want.recv_topk_idx), idx(*executor, want.topk_idx);
        const OnDevice<std::int64_t> selected(*executor, std::vector<std::int64_t>(want.topk_idx.size(), -9));
        const OnDevice<std::int32_t> src(*executor, want.source_token), prefix(*executor, want.prefix),
            destination(*executor, want.destination_row);
        const auto ints = [&](std::int64_t count) { return Ints(static_cast<std::size_t>(count), kUntouched); };
        const OnDevice<std::int32_t> ends(*executor, ints(want.ranks)), expert_ends(*executor, ints(want.experts)),
            counts(*executor, ints(want.experts)), stats(*executor, Ints(static_cast<std::size_t>(want.experts), 100)),
            metadata(*executor, ints(want.rows * (want.topk + 2))), local(*executor, ints(want.rows * want.topk)),
            at_owners(*executor, ints(want.tokens * want.topk)),
            scratch(*executor, ints(number_rows_scratch(executor, want.experts)));
        RowNumbering call{
            .recv_topk_idx = recv_idx.view(DType::int64, {want.rows, want.topk}),
            .recv_src_idx = src.view(DType::int32, {want.rows}),
            .rank_prefix_matrix = prefix.view(DType::int32, {want.ranks, want.ranks}),
            .destination_row = destination.view(DType::int32, {want.tokens, want.ranks}),
            .topk_idx = idx.view(DType::int64, {want.tokens, want.topk}),
            .rank = want.rank,
            .num_local_experts = want.experts,
            .max_tokens = want.max_tokens,
            .alignment = want.alignment,
            .expand = expand,
            .source_ends = ends.view(DType::int32, {want.ranks}),
            .expert_ends = expert_ends.view(DType::int32, {want.experts}),
            .expert_counts = counts.view(DType::int32, {want.experts}),
            .stats = stats.view(DType::int32, {want.experts}),
            .metadata = metadata.view(DType::int32, {want.rows, want.topk + 2}),
            .local = local.view(DType::int32, {want.rows, want.topk}),
            .rows_at_owners = at_owners.view(DType::int32, {want.tokens, want.topk}),
            .selected = selected.view(DType::int64, {want.tokens, want.topk}),
            .scratch = scratch.view(DType::int32, {number_rows_scratch(executor, want.experts)}),
        };
        number_rows(executor, call, nullptr);
        Ints wanted_metadata = want.metadata, wanted_ends, wanted_stats;
        for (std::size_t expert = 0; expert < want.counts.size(); ++expert) {
          const std::int32_t count = want.counts[expert];
          const std::int32_t padded = (count + want.alignment - 1) / want.alignment * want.alignment;
          wanted_ends.push_back(want.starts[expert] + (expand ? count : padded));
          wanted_stats.push_back(100 + count);
        }
        for (std::size_t i = 0; i < wanted_metadata.size() && !expand; ++i) {
          if (i % static_cast<std::size_t>(want.topk + 2) >= 2) wanted_metadata[i] = -1;
        }
        EXPECT_EQ(ends.read(), want.ends);
        EXPECT_EQ(expert_ends.read(), wanted_ends);
        EXPECT_EQ(counts.read(), want.counts);
        EXPECT_EQ(stats.read(), wanted_stats);
        EXPECT_EQ(metadata.read(), wanted_metadata);
        EXPECT_EQ(local.read(), want.local);
        EXPECT_EQ(at_owners.read(), want.at_owners);
        EXPECT_EQ(selected.read(), want.topk_idx);
      }
    }
  }
}

/// Numbers that say where they come from.
Ints numbered(std::int64_t count, std::int32_t first) {
  Ints values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = first + static_cast<std::int32_t>(i);
  return values;
}

TEST(SpreadRows, ToEverySelectionAndZeroInTheGaps) {
  constexpr std::int64_t kScales = 101;  // of which a warp takes 32 at a time
  for (const auto& executor : executors_present(5)) {
    for (const std::int64_t width : {4, 1028, 9000}) {        // of 4 bytes: the last in several pieces
      Received want(40, 31, 5, 3, 6, width == 4 ? 100 : 16);  // 100: gaps of more rows than the 64 warps that share one
      const std::int64_t spread = want.expanded + 3;
      want.slot(2, 0) = static_cast<std::int32_t>(spread);  // is not there
      const Ints rows = numbered(want.rows * width, 1), scales = numbered(want.rows * kScales, 2);
      const Ints weights = numbered(want.rows * want.topk, 3);
      const OnDevice<std::int32_t> ends(*executor, want.ends), metadata(*executor, want.metadata),
          counts(*executor, want.counts), from(*executor, rows), from_scales(*executor, scales),
          from_weights(*executor, weights), to(*executor, Ints(std::size_t((spread + 1) * width), kUntouched)),
          to_scales(*executor, Ints(std::size_t(spread * kScales + 1), kUntouched)),
          to_weights(*executor, Ints(std::size_t(spread + 1), kUntouched));  // a row more than there is
      RowSpreading call{
          .source_ends = ends.view(DType::int32, {want.ranks}),
          .metadata = metadata.view(DType::int32, {want.rows, want.topk + 2}),
          .rows = from.view(DType::int32, {want.rows, width}),
          .spread_rows = to.view(DType::int32, {spread, width}),
          .scales = from_scales.view(DType::int32, {want.rows, kScales}),
          .spread_scales = to_scales.view(DType::int32, {spread, kScales}),
          .weights = from_weights.view(DType::float32, {want.rows, want.topk}),
          .spread_weights = to_weights.view(DType::float32, {spread}),
          .expert_counts = counts.view(DType::int32, {want.experts}),
          .alignment = want.alignment,
      };
      call.spread_scales->strides = {1, spread};  // columns first
      spread_rows(executor, call, nullptr);

      Ints wanted(std::size_t((spread + 1) * width), kUntouched),
          wanted_scales(std::size_t(spread * kScales + 1), kUntouched),
          wanted_weights(std::size_t(spread + 1), kUntouched);
      const auto fill = [&](std::int64_t at, std::int64_t row, std::int32_t weight) {  // row -1: zeros
        for (std::int64_t i = 0; i < width; ++i) {
          wanted[std::size_t(at * width + i)] = row < 0 ? 0 : rows[std::size_t(row * width + i)];
        }
        for (std::int64_t i = 0; i < kScales; ++i) {
          wanted_scales[std::size_t(i * spread + at)] = row < 0 ? 0 : scales[std::size_t(row * kScales + i)];
        }
        wanted_weights[std::size_t(at)] = weight;
      };
      for (int expert = 0; expert < want.experts; ++expert) {
        const std::int64_t end = want.starts[std::size_t(expert)] + want.counts[std::size_t(expert)];
        for (std::int64_t at = end; at % want.alignment != 0; ++at) fill(at, -1, 0);
      }
      for (std::int64_t row = 0; row < want.valid; ++row) {
        for (std::int64_t k = 0; k < want.topk; ++k) {
          const std::int64_t at = want.slot(row, k);
          if (at >= 0 && at < spread) fill(at, row, weights[std::size_t(row * want.topk + k)]);
        }
      }
      EXPECT_EQ(to.read(), wanted) << "rows of " << width;
      EXPECT_EQ(to_scales.read(), wanted_scales);
      EXPECT_EQ(to_weights.read(), wanted_weights);
    }
  }
}

TEST(SpreadRows, OrLeavesThemWhereTheyAre) {
  for (const auto& executor : executors_present(6)) {
    const Received want(9, 6, 3, 2, 4, 1);
    const Ints rows = numbered(want.rows * 8, 1), together = numbered(want.rows * 7, 100);
    const OnDevice<std::int32_t> ends(*executor, want.ends), local(*executor, want.local), from(*executor, rows),
        beside(*executor, together), to(*executor, Ints(rows.size(), kUntouched)),
        weights(*executor, Ints(want.local.size(), kUntouched));
    const OnDevice<std::int64_t> indices(*executor, std::vector<std::int64_t>(want.local.size(), kUntouched));
    RowSpreading call{
        .source_ends = ends.view(DType::int32, {want.ranks}),
        .local = local.view(DType::int32, {want.rows, want.topk}),
        .rows = from.view(DType::int32, {want.rows, 8}),
        .spread_rows = to.view(DType::int32, {want.rows, 8}),
        .weights = beside.view(DType::int32, {want.rows, want.topk}),
        .spread_weights = weights.view(DType::float32, {want.rows, want.topk}),
        .spread_topk_idx = indices.view(DType::int64, {want.rows, want.topk}),
    };
    call.weights->strides = {7, 1};  // a part of wider rows
    spread_rows(executor, call, nullptr);
    Ints wanted(rows.begin(), rows.begin() + want.valid * 8);
    wanted.resize(rows.size(), kUntouched);
    Ints wanted_weights;
    for (std::int64_t i = 0; i < want.rows * want.topk; ++i) {
      const bool here = i / want.topk < want.valid && want.local[std::size_t(i)] >= 0;
      wanted_weights.push_back(here ? together[std::size_t(i / want.topk * 7 + i % want.topk)] : 0);
    }
    EXPECT_EQ(to.read(), wanted);
    EXPECT_EQ(weights.read(), wanted_weights);
    EXPECT_EQ(indices.read(), std::vector<std::int64_t>(want.local.begin(), want.local.end()));
  }
}

void expect_addresses(const std::shared_ptr<Executor>& executor, Received& want) {
  const std::int64_t columns = want.topk + 1, ranks = want.ranks;
  // One more before and behind those that there are.
  std::vector<float> weights(std::size_t(want.expanded + 2));
  for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(i) + 0.5f;
  const std::int64_t scratch_size = address_rows_scratch(executor, want.rows, want.ranks);
  for (const bool each_selection : {false, true}) {
    SCOPED_TRACE(std::to_string(want.rows) + " rows, each selection " + std::to_string(each_selection));
    const std::int64_t sent = each_selection ? want.expanded : want.rows;
    const OnDevice<std::int32_t> ends(*executor, want.ends), metadata(*executor, want.metadata),
        beside(*executor, Ints(std::size_t((sent + 1) * columns), kUntouched)),  // a row more than may travel
        per_rank(*executor, Ints(std::size_t(ranks), kUntouched)),
        scratch(*executor, Ints(std::size_t(scratch_size), kUntouched));
    std::vector<std::uint8_t> wanted_in_rank(std::size_t((sent + 1) * ranks), each_selection ? 0 : 7);
    const OnDevice<std::uint8_t> in_rank(*executor, wanted_in_rank);
    const OnDevice<float> given(*executor, weights);
    RowAddressing call{
        .metadata = metadata.view(DType::int32, {want.rows, want.topk + 2}),
        .source_ends = ends.view(DType::int32, {ranks}),
        .max_tokens = want.max_tokens,
        .each_selection = each_selection,
        .beside = beside.view(DType::int32, {sent, each_selection ? 1 : columns}),
        .is_token_in_rank = in_rank.view(DType::boolean, {sent, ranks}),
        .num_tokens_per_rank = per_rank.view(DType::int32, {ranks}),
    };
    if (!each_selection) {
      call.weights = given.view(DType::float32, {want.expanded});
      call.weights->data = call.weights->as<float>() + 1;
    }
    if (scratch_size != 0) call.scratch = scratch.view(DType::int32, {scratch_size});
    address_rows(executor, call, nullptr);

    std::fill_n(wanted_in_rank.begin(), sent * ranks, std::uint8_t{0});
    Ints wanted(std::size_t((sent + 1) * columns), kUntouched), wanted_per_rank(std::size_t(ranks), 0);
    for (std::int64_t row = 0; row < want.valid; ++row) {
      const std::int32_t source = want.slot(row, -2) / want.max_tokens, token = want.slot(row, -2) % want.max_tokens;
      if (want.slot(row, -2) < 0 || source >= ranks) continue;
      const auto goes = [&](std::int64_t at) {
        wanted_in_rank[std::size_t(at * ranks + source)] = 1;
        ++wanted_per_rank[std::size_t(source)];
      };
      for (std::int64_t k = 0; k < want.topk; ++k) {
        const std::int32_t slot = want.slot(row, k);
        if (!each_selection) {
          const float weight = slot < 0 || slot >= want.expanded ? 0.0f : weights[std::size_t(slot + 1)];
          wanted[std::size_t(row * columns + 1 + k)] = std::bit_cast<std::int32_t>(weight);
        } else if (slot >= 0 && slot < sent) {
          goes(slot);
          wanted[std::size_t(slot)] = token * static_cast<int>(want.topk) + static_cast<int>(k);
        }
      }
      if (each_selection) continue;
      goes(row);
      wanted[std::size_t(row * columns)] =
          token * static_cast<int>(want.topk) + want.slot(row, -1) % static_cast<int>(want.topk);
    }
    EXPECT_EQ(in_rank.read(), wanted_in_rank);
    EXPECT_EQ(beside.read(), wanted);
    EXPECT_EQ(per_rank.read(), wanted_per_rank);
  }
}

TEST(AddressRows, BackToTheirTokens) {
  for (const auto& executor : executors_present(7)) {
    Received want(50, 41, 4, 3, 4, 8);
    want.slot(7, -2) = -1;  // programs may put in metadata of their own
    want.slot(8, -2) = want.ranks * want.max_tokens;
    want.slot(9, 1) = static_cast<std::int32_t>(want.expanded);
    expect_addresses(executor, want);
  }
}

TEST(AddressRows, OfNoneOneAndVeryManyRanks) {
  for (const auto& executor : executors_present(8)) {
    for (Received want : {Received(0, 0, 4, 2, 2, 1), Received(1, 1, 1, 1, 1, 1), Received(6, 0, 2, 3, 2, 4),
                          Received(33, 30, 3, 128, 5, 2)}) {
      expect_addresses(executor, want);
    }
  }
}

TEST(AddressRows, SeveralBlocksCountManyRows) {
  constexpr std::int64_t kMost = 2048;  // that one block counts
  for (const auto& executor : executors_present(9)) {
    EXPECT_EQ(address_rows_scratch(executor, kMost, 3), 0);
    EXPECT_GT(address_rows_scratch(executor, kMost + 1, 3), 3);
    for (Received want : {Received(kMost, kMost, 1, 5, 2, 1), Received(kMost + 1, kMost + 1, 1, 5, 2, 4),
                          Received(5003, 4001, 2, 3, 4, 8), Received(3000, 7, 2, 40, 4, 1)}) {
      want.slot(5, -2) = -1;
      expect_addresses(executor, want);
    }
  }
}

TEST(AddRowCounts, OfMoreBlocksThanAWarpHasLanes) {
  for (const auto& executor : executors_present(10)) {
    for (const int ranks : {1, 7, 128}) {
      for (const int blocks : {2, 32, 33, 128}) {
        const Ints told = numbered(std::int64_t{blocks} * ranks, 3);
        const OnDevice<std::int32_t> counts(*executor, told), sums(*executor, Ints(std::size_t(ranks), kUntouched));
        AddressRowsParams params{};
        params.num_ranks = ranks;
        params.counting_blocks = blocks;
        params.block_counts = counts.view(DType::int32, {blocks, ranks}).as<std::int32_t>();
        params.num_tokens_per_rank = sums.view(DType::int32, {ranks}).as<std::int32_t>();
        backend_of(executor)->make_current();
        backend_of(executor)->kernels().add_row_counts(params, {2, 64, 0}, nullptr);
        Ints wanted(std::size_t(ranks), 0);
        for (std::size_t i = 0; i < told.size(); ++i) wanted[i % std::size_t(ranks)] += told[i];
        EXPECT_EQ(sums.read(), wanted) << blocks << " blocks, " << ranks << " ranks";
      }
    }
  }
}

TEST(RowLayout, NamesWhatIsWrong) {
  const auto executor = make_host_executor();
  std::vector<std::int64_t> memory(4096);
  const auto view = [&](DType dtype, std::initializer_list<std::int64_t> shape) {
    return TensorView::contiguous(memory.data(), dtype, shape);
  };
  const auto expect = [](const std::string& said, const char* text) {
    EXPECT_NE(said.find(text), std::string::npos) << said;
  };
  RowSpreading spreading{.source_ends = view(DType::int32, {2})};
  const auto spread = [&] { return refusal([&] { spread_rows(executor, spreading, nullptr); }); };
  expect(spread(), "metadata and local are not given");
  spreading.metadata = view(DType::int32, {4, 5});
  spreading.rows = view(DType::int32, {4, 4});
  expect(spread(), "rows and spread_rows: one is given");
  spreading.spread_rows = view(DType::int32, {9, 4});
  spreading.scales = view(DType::float32, {3, 2});
  spreading.spread_scales = view(DType::float32, {8, 2});
  expect(spread(), "scales is float32[3, 2], allowed: 4 rows or more");
  spreading.scales = view(DType::float32, {4, 2});
  expect(spread(), "spread_scales is float32[8, 2], allowed: 9 rows");
  spreading.scales = view(DType::int64, {4, 2});
  expect(spread(), "scales is int64[4, 2], allowed: elements of 4 bytes");
  spreading.scales.reset();
  spreading.spread_scales.reset();
  spreading.spread_topk_idx = view(DType::int64, {4, 3});
  expect(spread(), "spread_topk_idx is given, allowed: only without metadata");
  spreading.metadata = view(DType::int32, {4, 1});
  expect(spread(), "width of metadata is 1, allowed: 2 to 34");
  spreading.metadata.reset();
  spreading.local = view(DType::int32, {4, 3});
  spreading.spread_rows = view(DType::int32, {4, 4});
  spreading.expert_counts = view(DType::int32, {2});
  expect(spread(), "expert_counts is given, allowed: only with metadata");
  RowAddressing addressing{
      .metadata = view(DType::int32, {4, 5}), .source_ends = view(DType::int32, {2}), .max_tokens = 0};
  const auto address = [&] { return refusal([&] { address_rows(executor, addressing, nullptr); }); };
  expect(address(), "max_tokens is 0");
  std::vector<std::int32_t> large(9000 * 5);
  addressing.max_tokens = 9000;
  addressing.metadata = TensorView::contiguous(large.data(), DType::int32, {9000, 5});
  addressing.beside = TensorView::contiguous(large.data(), DType::int32, {9000, 1});
  addressing.is_token_in_rank = TensorView::contiguous(large.data(), DType::boolean, {9000, 2});
  addressing.num_tokens_per_rank = view(DType::int32, {2});
  const std::string wanted = std::to_string(address_rows_scratch(executor, 9000, 2));
  expect(address(), ("scratch is not given, allowed: int32[" + wanted + "] for 9000 rows").c_str());
  addressing.scratch = view(DType::int32, {1});
  expect(address(), ("scratch is int32[1], its shape must be [" + wanted + "]").c_str());
}

}  // namespace
}  // namespace deep_ep::test
