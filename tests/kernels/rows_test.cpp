// sum_rows on every executor present.
#include "deep_ep/rows.hpp"

#include <cmath>

#include "tests/kernels/on_device.hpp"
#include "tests/kernels/test_kernel.hpp"

namespace deep_ep::test {
namespace {

constexpr std::uint16_t kPoison = 0xdead;

std::vector<std::uint16_t> numbers(std::size_t count, std::uint32_t seed) {
  std::vector<std::uint16_t> values(count);
  for (auto& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value =
        bf16_of((static_cast<float>(seed >> 8) / 16777216.0f - 0.5f) * std::ldexp(1.0f, static_cast<int>(seed % 9)));
  }
  return values;
}

TEST(SumRows, AddsInOrderAndRoundsOnce) {
  constexpr std::int64_t kRows = 7, kSums = 13, kTerms = 5;
  for (const auto& executor : executors_present(3)) {
    for (const std::int64_t width : {8, 520, 2056}) {
      for (const int biases : {0, 1, 2}) {
        std::vector<std::uint16_t> rows = numbers(kRows * width, 1);
        rows[0] = bf16_of(-0.0f);
        std::vector<std::int64_t> index(kSums * kTerms, -1);
        for (std::int64_t i = 0; i < kSums * kTerms; ++i) {
          if (i >= 2 * kTerms && i % 3 != 0) index[static_cast<std::size_t>(i)] = i * 5 % kRows;
        }
        index[3] = 0;           // sum 0: row 0 alone, and nothing for sum 1
        index[kTerms] = kRows;  // is not there
        const std::vector<std::uint16_t> bias[2] = {numbers(kSums * width, 2), numbers(kSums * width, 3)};
        const OnDevice<std::uint16_t> x(*executor, rows), bias_0(*executor, bias[0]), bias_1(*executor, bias[1]);
        const OnDevice<std::uint16_t> sums(*executor, std::vector<std::uint16_t>(kSums * width, kPoison));
        const OnDevice<std::int64_t> which(*executor, index);
        const auto of_sums = [&](const auto& memory) { return memory.view(DType::bfloat16, {kSums, width}); };
        const auto optional = [&](bool there, const auto& memory) {
          return there ? std::optional<ConstTensorView>(of_sums(memory)) : std::nullopt;
        };
        sum_rows(executor, x.view(DType::bfloat16, {kRows, width}), which.view(DType::int64, {kSums, kTerms}),
                 optional(biases > 0, bias_0), optional(biases > 1, bias_1), of_sums(sums), nullptr);
        const std::vector<std::uint16_t> got = sums.read();
        for (std::int64_t i = 0; i < kSums * width; ++i) {
          float sum = -0.0f;
          bool any = false;
          for (int b = 0; b < biases; ++b, any = true) sum += float_of(bias[b][static_cast<std::size_t>(i)]);
          for (std::int64_t k = 0; k < kTerms; ++k) {
            const std::int64_t row = index[static_cast<std::size_t>(i / width * kTerms + k)];
            if (row < 0 || row >= kRows) continue;
            sum += float_of(rows[static_cast<std::size_t>(row * width + i % width)]);
            any = true;
          }
          ASSERT_EQ(got[static_cast<std::size_t>(i)], bf16_of(any ? sum : 0.0f)) << "element " << i << ", " << biases;
        }
      }
    }
  }
}

TEST(SumRows, NamesWhatIsWrong) {
  const auto executor = make_host_executor();
  std::vector<std::uint16_t> memory(1024);
  const auto view = [&](DType dtype, std::initializer_list<std::int64_t> shape) {
    return TensorView::contiguous(memory.data(), dtype, shape);
  };
  const auto sum = [&](const TensorView& rows, const TensorView& index, const TensorView& sums) {
    return refusal([&] { sum_rows(executor, rows, index, std::nullopt, std::nullopt, sums, nullptr); });
  };
  const TensorView rows = view(DType::bfloat16, {4, 16});
  EXPECT_NE(sum(view(DType::float32, {4, 16}), view(DType::int64, {2, 2}), rows).find("rows has dtype float32"),
            std::string::npos);
  EXPECT_NE(sum(view(DType::bfloat16, {4, 12}), view(DType::int64, {2, 2}), rows).find("multiple of 16"),
            std::string::npos);
  EXPECT_NE(sum(rows, view(DType::int64, {2, 33}), rows).find("width of index is 33, allowed: 0 to 32"),
            std::string::npos);
  EXPECT_NE(sum(rows, view(DType::int64, {2, 2}), rows).find("sums is bfloat16[4, 16]"), std::string::npos);
  EXPECT_NE(refusal([&] {
              sum_rows(executor, rows, view(DType::int64, {2, 2}), rows, std::nullopt, rows, nullptr);
            }).find("bias_0 is bfloat16[4, 16]"),
            std::string::npos);
}

}  // namespace
}  // namespace deep_ep::test
