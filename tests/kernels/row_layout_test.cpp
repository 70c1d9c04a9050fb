// Kernels that number, move and address rows, on every executor present, against plain loops.
#include <bit>
#include <random>

#include "csrc/buffer/elastic/elastic.hpp"
#include "csrc/executor/backend.hpp"
#include "tests/kernels/on_device.hpp"
#include "tests/kernels/test_kernel.hpp"

namespace deep_ep::test {
namespace {

using Ints = std::vector<std::int32_t>;
constexpr std::int32_t kUntouched = -77;

/// Of a call that goes well, and of one that has failed.
struct Aborts {
  OnDevice<std::uint64_t> none, set;

  explicit Aborts(Executor& executor) : none(executor, {0}), set(executor, {1}) {}
};
/// A rank's executor, which is current.
Backend& current(const std::shared_ptr<Executor>& executor) {
  Backend& backend = *backend_of(executor);
  backend.make_current();
  return backend;
}

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
    // A row comes for one expert at least.
    for (std::int64_t row = 0; row < rows; ++row) {
      recv_topk_idx[static_cast<std::size_t>(row * topk + below(topk))] = below(experts);
    }
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

  /// The first row of each gap, in the expanded layout.
  Ints gaps() const {
    Ints begins = starts;
    for (std::size_t expert = 0; expert < begins.size(); ++expert) begins[expert] += counts[expert];
    return begins;
  }

  RowMetadata rows_at(const OnDevice<std::int32_t>& table, const OnDevice<std::int32_t>& source_ends) const {
    return {table.data(), topk + 2, rows, static_cast<int>(topk), source_ends.data() + ranks - 1};
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
    const Aborts aborts(*executor);
    for (const Received& want :
         {Received(700, 700, 4, 3, 5, 8), Received(300, 171, 9, 2, 40, 1), Received(5, 0, 2, 1, 3, 4),
          Received(0, 0, 4, 2, 2, 1), Received(33, 20, 1, 4, 70, 16), Received(40, 40, 2, 3, 4, 1, 9),
          Received(4100, 4051, 4, 3, 37, 8)}) {  // the last: so many that blocks tell each other their counts
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
            exchanged(*executor, ints(std::int64_t{128} * want.experts));
        const OnDevice<std::uint32_t> ticket(*executor, {0});
        const OnDevice<std::uint64_t> counted(*executor, {5});  // of calls before
        NumberRowsParams params{};
        NumberingParams& numbers = params.numbers;
        numbers.metadata = want.rows_at(metadata, ends);
        params.recv_topk_idx = {recv_idx.data(), true};
        params.source = src.data();
        params.ends = prefix.data() + want.rank;
        params.ends_stride = numbers.num_ranks = want.ranks;
        numbers.rank = want.rank;
        numbers.num_experts = want.experts;
        numbers.max_tokens = want.max_tokens;
        numbers.alignment = want.alignment;
        numbers.clear_tail = true;
        numbers.expand = expand;
        numbers.source_ends = ends.data();
        numbers.expert_ends = expert_ends.data();
        numbers.expert_counts = counts.data();
        numbers.stats = stats.data();
        numbers.local = local.data();
        params.topk_idx = {idx.data(), true};
        params.num_tokens = want.tokens;
        params.destination_row = destination.data();
        numbers.rows_at_owners = at_owners.data();
        numbers.selected = reinterpret_cast<std::byte*>(selected.data());
        Backend& backend = current(executor);
        const LaunchShape shape =
            plan_numbering(params, want.rows, backend.policy(), backend.device().kind == Device::Kind::cuda);
        EXPECT_TRUE(shape.blocks > 1 || want.rows < 4000);
        numbers.exchange = {exchanged.data(), ticket.data(), counted.data()};
        params.wait.abort = aborts.set.data();
        backend.kernels().number_selections(params, shape, nullptr);
        for (const auto* untouched : {&ends, &expert_ends, &counts, &metadata, &local, &at_owners}) {
          const Ints values = untouched->read();
          EXPECT_EQ(values, Ints(values.size(), kUntouched));
        }
        params.wait.abort = aborts.none.data();
        backend.kernels().number_selections(params, shape, nullptr);
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
          gaps(*executor, want.gaps()), from(*executor, rows), from_scales(*executor, scales),
          from_weights(*executor, weights), to(*executor, Ints(std::size_t((spread + 1) * width), kUntouched)),
          to_scales(*executor, Ints(std::size_t(spread * kScales + 1), kUntouched)),
          to_weights(*executor, Ints(std::size_t(spread + 1), kUntouched));  // a row more than there is
      const Aborts aborts(*executor);
      SpreadRowsParams params{};
      params.abort = aborts.none.data();
      params.metadata = want.rows_at(metadata, ends);
      params.expand = true;
      params.num_spread = spread;
      params.rows = reinterpret_cast<const std::byte*>(from.data());
      params.spread_rows = reinterpret_cast<std::byte*>(to.data());
      params.row_bytes = static_cast<std::uint32_t>(width * 4);
      params.scales = reinterpret_cast<const std::uint32_t*>(from_scales.data());
      params.scale_stride = params.num_scales = kScales;
      params.spread_scales = reinterpret_cast<std::uint32_t*>(to_scales.data());
      params.spread_stride = 1;  // columns first
      params.spread_column_stride = spread;
      params.weights = reinterpret_cast<const std::uint32_t*>(from_weights.data());
      params.weight_stride = want.topk;
      params.spread_weights = reinterpret_cast<std::uint32_t*>(to_weights.data());
      params.expert_ends = gaps.data();
      params.num_experts = want.experts;
      params.alignment = want.alignment;
      Backend& backend = current(executor);
      const LaunchShape shape = plan_spreading(params, backend.policy());
      backend.kernels().spread_rows(params, shape, nullptr);

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
        const std::int64_t end = want.gaps()[std::size_t(expert)];
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
    const Aborts aborts(*executor);
    SpreadRowsParams params{};
    params.abort = aborts.none.data();
    params.metadata = want.rows_at(local, ends);  // its rows are not looked at
    params.num_spread = want.rows;
    params.local = local.data();
    params.rows = reinterpret_cast<const std::byte*>(from.data());
    params.spread_rows = reinterpret_cast<std::byte*>(to.data());
    params.row_bytes = 32;
    params.weights = reinterpret_cast<const std::uint32_t*>(beside.data());
    params.weight_stride = 7;  // a part of wider rows
    params.spread_weights = reinterpret_cast<std::uint32_t*>(weights.data());
    params.spread_topk_idx = reinterpret_cast<std::byte*>(indices.data());
    params.indices_are_64_bit = true;
    Backend& backend = current(executor);
    const LaunchShape shape = plan_spreading(params, backend.policy());
    backend.kernels().spread_rows(params, shape, nullptr);
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
  for (const bool each_selection : {false, true}) {
    SCOPED_TRACE(std::to_string(want.rows) + " rows, each selection " + std::to_string(each_selection));
    const std::int64_t sent = each_selection ? want.expanded : want.rows;
    const OnDevice<std::int32_t> ends(*executor, want.ends), metadata(*executor, want.metadata),
        beside(*executor, Ints(std::size_t((sent + 1) * columns), kUntouched)),  // a row more than may travel
        per_rank(*executor, Ints(std::size_t(ranks), 0));
    std::vector<std::uint8_t> wanted_in_rank(std::size_t((sent + 1) * ranks), 7);
    std::fill_n(wanted_in_rank.begin(), sent * ranks, std::uint8_t{0});
    const OnDevice<std::uint8_t> in_rank(*executor, wanted_in_rank);
    const OnDevice<float> given(*executor, weights);
    AddressRowsParams params{};
    params.metadata = want.rows_at(metadata, ends);
    params.num_ranks = want.ranks;
    params.max_tokens = want.max_tokens;
    params.each_selection = each_selection;
    params.num_sent = sent;
    params.beside = beside.data();
    params.columns = static_cast<int>(each_selection ? 1 : columns);
    params.is_token_in_rank = in_rank.data();
    params.num_tokens_per_rank = per_rank.data();
    if (!each_selection) {
      params.weights = given.data() + 1;
      params.weights_of_slots = true;
      params.num_weights = want.expanded;
    }
    address_rows(current(executor), params, nullptr);

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
  for (const auto& executor : executors_present(9)) {
    for (Received want :
         {Received(2049, 2049, 1, 5, 2, 4), Received(5003, 4001, 2, 3, 4, 8), Received(3000, 7, 2, 40, 4, 1)}) {
      want.slot(5, -2) = -1;
      expect_addresses(executor, want);
    }
  }
}

}  // namespace
}  // namespace deep_ep::test
