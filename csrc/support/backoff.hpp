// Polling that costs less the longer it takes.
#pragma once

#include <algorithm>
#include <chrono>

namespace deep_ep {

/// How long one who polls may sleep before the next look: an eighth of the time waited so far, so no wait becomes much
/// longer by it, and one that lasts leaves the processor to others. Threads of ranks wait for each other on few
/// processors, and until the deadline for a rank that is lost. Waits of kernels look at the clock at every 64th look
/// only, so a deadline or an abort may be noticed some 64 ms late. Who is served by the poller waits up to a nap: good
/// enough between ranks that share the processors, not in front of a device.
class Backoff {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::nanoseconds kShortest = std::chrono::microseconds(1);
  static constexpr std::chrono::nanoseconds kLongest = std::chrono::milliseconds(1);

  /// What was waited for has come: the next wait begins now.
  void restart() { begin_ = Clock::now(); }
  std::chrono::nanoseconds time() const { return Clock::now() - begin_; }
  std::chrono::nanoseconds nap() const { return std::clamp(time() / 8, kShortest, kLongest); }

 private:
  Clock::time_point begin_ = Clock::now();
};

}  // namespace deep_ep
