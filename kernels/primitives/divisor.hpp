// Numbers that kernels divide by and the host knows.
#pragma once

#include "kernels/primitives/target.hpp"

namespace deep_ep {

/// A positive int. The host makes it of an int, as that takes a 64-bit division; code for the GPU is not allowed to.
/// `n / divisor` and `n % divisor` take a multiplication where dividing by an int takes some thirty
/// instructions: exact for every n >= 0 with n * divisor <= 2^32 (the error of the inverse, below divisor / 2^32, times
/// n / divisor stays below 1 / divisor).
class Divisor {
 public:
  DEEP_EP_HOST_DEVICE constexpr Divisor() : value_(1), inverse_(0) {}
  constexpr Divisor(int value)  // NOLINT(google-explicit-constructor): it is that int
      : value_(static_cast<std::uint32_t>(value)),
        inverse_(value <= 1 ? 0 : static_cast<std::uint32_t>(((std::uint64_t{1} << 32) + value_ - 1) / value_)) {}

  DEEP_EP_HOST_DEVICE constexpr operator int() const {  // NOLINT(google-explicit-constructor)
    return static_cast<int>(value_);
  }

  DEEP_EP_HOST_DEVICE friend constexpr int operator/(int number, const Divisor& divisor) {
    if (divisor.inverse_ == 0) return number;
    return static_cast<int>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(number)) * divisor.inverse_ >> 32);
  }
  DEEP_EP_HOST_DEVICE friend constexpr int operator%(int number, const Divisor& divisor) {
    return number - number / divisor * static_cast<int>(divisor.value_);
  }

 private:
  std::uint32_t value_;
  std::uint32_t inverse_;  ///< 2^32 / value, rounded up; 0 for 1
};

}  // namespace deep_ep
