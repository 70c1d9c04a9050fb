// Ranks whose lines do not arrive whole, or not at all: for the check that a buffer over a fabric makes.
#include "kernels/low_latency/line_test.hpp"
#include "kernels/primitives/launch.hpp"
#include "tests/kernels/defects/defects.hpp"

namespace deep_ep::device {
namespace {

constexpr int kTornRound = 7;

/// In one round 16 bytes of one line stay behind: its tag is there, and they are of an earlier round.
DEEP_EP_DEVICE void torn_lines(const LineTestParams& params, std::byte*) {
  test_lines(params, [](std::byte* to, LinePart part, int round) {
    if (round == kTornRound && lane_index() == 11) {
      const auto* before = reinterpret_cast<const std::uint64_t*>(to);
      part = {{load_relaxed<Scope::system>(before), load_relaxed<Scope::system>(before + 1)}};
    }
    store_line(to, part, true);
  });
}

DEEP_EP_DEVICE void no_lines(const LineTestParams&, std::byte*) {}

}  // namespace
}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(defect_torn_lines, deep_ep::device::torn_lines)
DEEP_EP_DEFINE_KERNEL(defect_no_lines, deep_ep::device::no_lines)
