// Sums of rows on every executor present, against plain loops.
#include <cmath>

#include "csrc/buffer/elastic/elastic.hpp"
#include "csrc/executor/backend.hpp"
#include "tests/kernels/on_device.hpp"
#include "tests/kernels/test_kernel.hpp"

namespace deep_ep::test {
namespace {

using Words = std::vector<std::int32_t>;
constexpr std::int32_t kUnwritten = -78;

/// What must not make a row count.
struct Misleading {
  bool each_selection;
  std::int64_t room, came;  ///< rows: the smaller number counts
  std::int32_t stale;       ///< the row of selection 7, which has none, as memory of the scratch may say
};

// Row 3 is another selection's, row 7 did not come but says that it is of selection 7, and the last is no memory at
// all.
constexpr Misleading kMisleading[] = {
    {false, 9, 7, 3}, {false, 9, 7, 7}, {false, 7, 9, 7}, {false, 9, 7, INT32_MIN},
    {true, 9, 7, 3},  {true, 9, 7, 7},  {true, 7, 9, 7},  {true, 9, 7, INT32_MIN},
};

TEST(SumReturnedRows, BySelectionAndWithoutRowsThatNobodySent) {
  constexpr std::int64_t kTokens = 3, kTopk = 4, kWidth = 1032, kRows = 9;  // rows of three pieces
  constexpr int kExperts = 2;                                               // rank 0: experts 0 and 1
  // Ranks of the selections: 1 0 1 -; - 2 2 0; - - - -. Of the first token's last ones the rank 1 comes after rank 0.
  const std::vector<std::int64_t> idx = {2, 0, 3, -1, -5, 4, 5, 1, -1, -1, -1, -1};
  constexpr std::size_t kAround = 100;  // elements before and behind the scratch
  for (const auto& executor : executors_present(8)) {
    for (const auto& [each_selection, room, came, stale] : kMisleading) {
      SCOPED_TRACE("each selection " + std::to_string(each_selection) + ", " + std::to_string(came) + " rows came to " +
                   std::to_string(room) + ", stale " + std::to_string(stale));
      // Row 4 speaks of a selection that is not there, rows 7 and 8 did not come. Selection 7 has no row.
      const Words ids = each_selection ? Words{0, 2, 6, 1, 99, 5, -3, 7, 0} : Words{2, 6, -1, 1, 99, -1, 11, 7, 2};
      Words beside;
      for (std::size_t row = 0; row < kRows; ++row) {
        beside.push_back(ids[row]);
        for (int k = 0; k < kTopk; ++k) beside.push_back(static_cast<std::int32_t>(row) * 10 + k);
      }
      std::vector<std::uint16_t> rows, bias;
      for (std::int64_t i = 0; i < kRows * kWidth; ++i)
        rows.push_back(bf16_of(std::ldexp(1.0f + float(i % 13), int(i / kWidth) * 3)));
      for (std::int64_t i = 0; i < kTokens * kWidth; ++i) bias.push_back(bf16_of(-float(i % 7)));
      Words memory(kAround + kTokens * kTopk + kAround, kUnwritten);
      std::fill_n(memory.begin() + kAround, kTokens * kTopk, 3);
      memory[kAround + 7] = stale;
      const OnDevice<std::uint16_t> x(*executor, rows), first(*executor, bias),
          sums(*executor, std::vector<std::uint16_t>(bias.size() + kWidth, 1));  // and what is not theirs
      const OnDevice<std::int32_t> told(*executor, beside), valid(*executor, {static_cast<std::int32_t>(came)}),
          weights(*executor, Words(kTokens * kTopk, kUnwritten)), scratch(*executor, memory);
      const OnDevice<std::int64_t> selections(*executor, idx);
      const OnDevice<std::uint64_t> failed(*executor, {1}), well(*executor, {0});
      SumRowsParams params{};
      params.rows = reinterpret_cast<const std::byte*>(x.data());
      params.num_rows = room;
      params.bias[0] = reinterpret_cast<const std::byte*>(first.data());
      params.sums = reinterpret_cast<std::byte*>(sums.data());
      params.row_bytes = kWidth * 2;
      params.returned = {.beside = told.data(),
                         .beside_stride = 1 + kTopk,
                         .num_valid = valid.data(),
                         .topk_idx = {selections.data(), true},
                         .num_tokens = kTokens,
                         .num_topk = kTopk,
                         .num_experts = kExperts,
                         .each_selection = each_selection,
                         .weights = weights.data(),
                         .row_of = scratch.data() + kAround};
      Backend& backend = *backend_of(executor);
      backend.make_current();
      params.abort = failed.data();
      find_returned_rows(backend, params, nullptr);
      sum_rows(backend, params, nullptr);
      EXPECT_EQ(sums.read(), std::vector<std::uint16_t>(bias.size() + kWidth, 1)) << "sums of a call that has failed";
      params.abort = well.data();
      sum_rows(backend, params, nullptr);
      const std::vector<std::vector<int>> terms = each_selection ? std::vector<std::vector<int>>{{0, 3, 1}, {5, 2}, {}}
                                                                 : std::vector<std::vector<int>>{{3, 0}, {1}, {}};
      const auto got = sums.read();
      for (std::int64_t i = 0; i < kTokens * kWidth; ++i) {
        float sum = float_of(bias[std::size_t(i)]);
        for (const int row : terms[std::size_t(i / kWidth)])
          sum += float_of(rows[std::size_t(row * kWidth + i % kWidth)]);
        ASSERT_EQ(got[std::size_t(i)], bf16_of(sum)) << "element " << i;
      }
      for (std::size_t i = bias.size(); i < got.size(); ++i) ASSERT_EQ(got[i], 1) << "behind the sums";
      if (!each_selection) {
        EXPECT_EQ(weights.read(), (Words{0, 31, 2, 0, 0, 11, 12, 0, 0, 0, 0, 0}));
      }
      const Words after = scratch.read();
      for (std::size_t i = 0; i < kAround; ++i) {
        ASSERT_EQ(after[i], kUnwritten) << "element " << i << " before the scratch";
        ASSERT_EQ(after[after.size() - 1 - i], kUnwritten) << "element behind the scratch, " << i << " from the end";
      }
    }
  }
}

TEST(SumExpandedRows, OfValidRowsOnly) {
  constexpr std::int64_t kWidth = 16;
  for (const auto& executor : executors_present(9)) {
    const std::vector<std::uint16_t> rows = [] {
      std::vector<std::uint16_t> values;
      for (int row = 0; row < 10; ++row) values.insert(values.end(), kWidth, bf16_of(float(1 << row)));
      return values;
    }();
    const OnDevice<std::uint16_t> x(*executor, rows), sums(*executor, std::vector<std::uint16_t>(5 * kWidth, 1));
    // x has four rows, so row 9 is not there; and the last row of the table is not valid.
    const OnDevice<std::int32_t> table(
        *executor, {0, 0, 3, -1, 1, 0, 0, -1, -1, 0, 0, 0, 9, 2, -1, 0, 0, -1, -1, -1, 0, 0, 1, 1, 1}),
        ends(*executor, {2, 4});
    const OnDevice<std::uint64_t> abort(*executor, {0});
    SumRowsParams params{};
    params.abort = abort.data();
    params.rows = reinterpret_cast<const std::byte*>(x.data());
    params.num_rows = 4;
    params.metadata = {table.data(), 5, 5, 3, ends.data() + 1};
    params.sums = reinterpret_cast<std::byte*>(sums.data());
    params.row_bytes = kWidth * 2;
    Backend& backend = *backend_of(executor);
    backend.make_current();
    sum_rows(backend, params, nullptr);
    const auto got = sums.read();
    const std::uint16_t wanted[] = {bf16_of(10), bf16_of(1), bf16_of(4), bf16_of(0), 1};
    for (std::int64_t i = 0; i < 5 * kWidth; ++i) ASSERT_EQ(got[std::size_t(i)], wanted[i / kWidth]) << i;
  }
}

}  // namespace
}  // namespace deep_ep::test
