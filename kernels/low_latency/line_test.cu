// Tries whether tagged lines arrive whole: see line_test.hpp.
#include "kernels/low_latency/line_test.hpp"

#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE void line_test_body(const LineTestParams& params, std::byte*) {
  test_lines(params, [](std::byte* to, const LinePart& part, int) { store_line(to, part, true); });
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(line_test, deep_ep::device::line_test_body)
