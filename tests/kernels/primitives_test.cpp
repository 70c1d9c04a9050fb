// Tagged lines of kernels/primitives on every executor. What else is there, every call uses.
#include <gtest/gtest.h>

#include <cstdint>

#include "kernels/primitives/line.hpp"
#include "tests/kernels/probes/probes.hpp"
#include "tests/kernels/test_kernel.hpp"

namespace deep_ep::test {
namespace {

using namespace deep_ep::probes;

/// A row in the memory of the device, where lines arrive whole.
TEST(Primitives, TaggedLines) {
  const TestKernel<LineParams> kernel(DEEP_EP_TEST_LAUNCHERS(line_probe));
  on_every_executor([&](Executor& executor) {
    const bool gpu = executor.device().kind == Device::Kind::cuda;
    const int rounds = gpu ? 20'000 : 3;
    const int lines = gpu ? 62 : 13;
    const std::size_t bytes = static_cast<std::size_t>(lines) * kTaggedLine;
    executor.make_current();
    auto* row = static_cast<std::byte*>(executor.allocate(bytes + 64));  // the counters lie behind it
    const StreamHandle stream = executor.create_stream();
    executor.fill(row, 0, bytes + 64, stream);
    auto* counters = reinterpret_cast<std::uint64_t*>(row + bytes);
    kernel(executor, stream, {2, gpu ? 512 : 64, 0}, {rounds, lines, row, counters, counters + 1});
    std::uint64_t results[2] = {};
    executor.copy(results, counters, sizeof results, stream);
    executor.synchronize(stream);
    executor.destroy_stream(stream);
    executor.free(row);
    EXPECT_EQ(results[0], static_cast<std::uint64_t>(rounds * (gpu ? 16 : 2)));
    EXPECT_EQ(results[1], 0u);
  });
}

}  // namespace
}  // namespace deep_ep::test
