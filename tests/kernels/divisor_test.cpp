// Divisor gives what `/` and `%` give, in all of its range.
#include "kernels/primitives/divisor.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace deep_ep {
namespace {

void expect_exact(int number, int value) {
  const Divisor divisor = value;
  ASSERT_EQ(number / divisor, number / value) << number << " / " << value;
  ASSERT_EQ(number % divisor, number % value) << number << " % " << value;
}

/// Where a quotient changes, the inverse's error shows first, and most for the largest numbers.
TEST(Divisor, AroundMultiplesOfEverySize) {
  std::vector<int> values;
  for (int value = 1; value < 600; ++value) values.push_back(value);
  for (int bit = 10; bit <= 30; ++bit) {
    for (int near = -3; near <= 3; ++near) values.push_back((1 << bit) + near);
  }
  for (const int value : values) {
    constexpr std::int64_t last = INT32_MAX;
    const std::int64_t quotients = last / value;
    const std::int64_t step = quotients / 500 + 1;
    for (std::int64_t quotient = quotients; quotient >= 0; quotient -= step) {
      for (std::int64_t number = quotient * value - 1; number <= quotient * value + 1; ++number) {
        if (number >= 0 && number <= last) expect_exact(static_cast<int>(number), value);
      }
    }
    expect_exact(static_cast<int>(last), value);
  }
}

}  // namespace
}  // namespace deep_ep
