// Numbers that kernels divide by and the host knows.
#pragma once

#include "kernels/primitives/target.hpp"

namespace deep_ep {

/// A positive int. The host makes it of an int, as that takes a 64-bit division; code for the GPU is not allowed to.
/// `n / divisor` and `n % divisor`, for n >= 0, take a multiplication and a shift where dividing by an int takes some
/// thirty instructions, one after the other. With s the bits of divisor - 1, the inverse 2^(31 + s) / divisor, rounded
/// up, is less than 2^s / divisor too large: so is the quotient by less than n / 2^31 / divisor, and it is exact.
class Divisor {
 public:
  constexpr Divisor() = default;
  constexpr Divisor(int value) : value_(static_cast<std::uint32_t>(value)) {  // NOLINT(google-explicit-constructor)
    if (value <= 1) return;
    while ((value_ - 1) >> shift_ > 1) ++shift_;
    inverse_ = static_cast<std::uint32_t>(((std::uint64_t{1} << (32 + shift_)) + value_ - 1) / value_);
  }

  DEEP_EP_HOST_DEVICE constexpr operator int() const {  // NOLINT(google-explicit-constructor)
    return static_cast<int>(value_);
  }

  DEEP_EP_HOST_DEVICE friend constexpr int operator/(int number, const Divisor& divisor) {
    if (divisor.inverse_ == 0) return number;
    const std::uint64_t product = static_cast<std::uint64_t>(static_cast<std::uint32_t>(number)) * divisor.inverse_;
    return static_cast<int>(static_cast<std::uint32_t>(product >> 32) >> divisor.shift_);
  }
  DEEP_EP_HOST_DEVICE friend constexpr int operator%(int number, const Divisor& divisor) {
    return number - number / divisor * static_cast<int>(divisor.value_);
  }
  DEEP_EP_HOST_DEVICE friend constexpr int align_up(int number, const Divisor& alignment) {
    return (number + alignment - 1) / alignment * alignment;
  }

 private:
  std::uint32_t value_ = 1;
  std::uint32_t inverse_ = 0;  ///< 0 for 1
  std::uint32_t shift_ = 0;    ///< s - 1
};

}  // namespace deep_ep
