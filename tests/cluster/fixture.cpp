#include "tests/cluster/fixture.hpp"

#include <cstdio>
#include <cstdlib>
#include <random>

namespace deep_ep::test {

std::int64_t environment_number(const char* name, std::int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoll(text, nullptr, 0);
}

std::uint64_t test_seed() {
  static const std::uint64_t seed = [] {
    if (const char* const text = std::getenv("DEEP_EP_TEST_SEED")) return std::strtoull(text, nullptr, 0);
    const unsigned long long fresh = std::random_device{}();
    // Rank processes must draw the same.
    setenv("DEEP_EP_TEST_SEED", std::to_string(fresh).c_str(), 1);
    return fresh;
  }();
  std::printf("DEEP_EP_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

void run_rounds(const ClusterOptions& cluster, std::span<const Shape> shapes, const RoundOptions& round,
                const BufferOptions& buffer_options) {
  std::vector<Case> cases;
  for (const Shape& shape : shapes) cases.push_back(make_case(shape));
  run_with_buffers(cluster, buffer_options, [&](Rank& rank, Buffer& buffer) {
    for (const Case& one : cases) {
      run_round(rank, buffer, one, round);
      rank.release();
    }
  });
}

}  // namespace deep_ep::test
