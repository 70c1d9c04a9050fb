#include "csrc/support/deadline.hpp"

#include <algorithm>
#include <cmath>

#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep {

double timeout_in_effect(std::optional<double> timeout_s) {
  const double seconds = timeout_s ? *timeout_s : environment::number("DEEP_EP_TIMEOUT_S");
  if (!std::isfinite(seconds) || seconds < 0) {
    fail<InvalidArgument>("timeout_s is {}, allowed: seconds, 0 = wait for ever", seconds);
  }
  return seconds == 0 ? 0 : std::max(seconds, 1e-6);
}

}  // namespace deep_ep
