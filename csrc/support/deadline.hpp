// A moment after which waiting is given up. Zero seconds means never, as in DEEP_EP_TIMEOUT_S.
#pragma once

#include <chrono>
#include <optional>

namespace deep_ep {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Deadline(double seconds) : seconds_(seconds) {
    // More than a century would overflow the clock, and is "never" all the same.
    if (seconds > 0 && seconds < 3e9) {
      moment_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    }
  }

  double seconds() const { return seconds_; }
  bool expired() const { return moment_ && Clock::now() >= *moment_; }

 private:
  double seconds_;
  std::optional<Clock::time_point> moment_;
};

/// The seconds that a wait may take: `timeout_s` where given, else DEEP_EP_TIMEOUT_S. 0: for ever. InvalidArgument for
/// a negative number, NaN and infinity. Less than a microsecond counts as one: nobody who asks for it means "for ever".
double timeout_in_effect(std::optional<double> timeout_s);

}  // namespace deep_ep
