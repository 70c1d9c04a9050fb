// Random numbers that are the same everywhere (the standard library's distributions differ between libraries).
#pragma once

#include <cstdint>
#include <iterator>

namespace deep_ep::oracle {

/// SplitMix64.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  /// In [0, bound), bound > 0.
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(bound));
  }
  /// In [0, 1).
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  bool chance(double probability) { return unit() < probability; }
  template <class Container>
  auto pick(const Container& choices) {
    return *(std::begin(choices) + below(static_cast<std::int64_t>(std::size(choices))));
  }

 private:
  std::uint64_t state_;
};

/// A well-mixed number for every input.
inline std::uint64_t hash(std::uint64_t value) { return Random(value).next(); }
inline std::uint64_t hash(std::uint64_t a, std::uint64_t b) { return hash(hash(a) ^ b); }

/// A random number as one in [-1, 1).
inline float to_signed_unit(std::uint64_t random) {
  return static_cast<float>(static_cast<std::int64_t>(random >> 40)) * 0x1p-23f - 1.0f;
}

/// A seed for something inside something seeded: differs for every `part`.
inline std::uint64_t derive_seed(std::uint64_t seed, std::uint64_t part) {
  Random random(seed ^ (part * 0xd1342543de82ef95u + 1));
  random.next();
  return random.next();
}

}  // namespace deep_ep::oracle
