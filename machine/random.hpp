// The dice of a seeded schedule.
#pragma once

#include <cstdint>

namespace deep_ep::host_machine {

/// A seed of its own for part `number`, unrelated to its neighbours' (splitmix64's finisher). 0 stays 0.
constexpr std::uint64_t derive_seed(std::uint64_t seed, std::uint64_t number) {
  if (seed == 0) return 0;
  std::uint64_t z = seed + (number + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/// Seed 0 is the fixed schedule: enabled() is false and every chance says no.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  bool enabled() const { return state_ != 0; }
  /// True once in `one_in` times.
  bool chance(std::uint32_t one_in) { return enabled() && next() % one_in == 0; }
  /// 0 to n - 1; 0 in the fixed schedule.
  std::uint32_t below(std::uint32_t n) { return enabled() ? static_cast<std::uint32_t>(next() % n) : 0; }

 private:
  std::uint64_t next() {  // xorshift64*: never reaches state 0
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return (state_ * 0x2545f4914f6cdd1du) >> 16;
  }

  std::uint64_t state_;
};

}  // namespace deep_ep::host_machine
