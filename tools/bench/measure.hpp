// Times of work that all ranks do together.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::tools {

/// Seconds. A round's time is that of its slowest rank.
struct Timing {
  double median = 0;  ///< of aligned rounds: from an event before the call to one after its last kernel
  double fastest = 0;
  double slowest = 0;
  double mean = 0;
  double wall = 0;          ///< median of the same rounds by the host's clock: from the call to the end of its kernels
  double back_to_back = 0;  ///< median of rounds enqueued one after the other, without the host waiting in between
  double host = 0;          ///< of the same rounds: how long a call keeps the host busy, median of the slowest rank
};

struct Rounds {
  int warmup = 10;
  int count = 30;
};

class Meter {
 public:
  Meter(Bootstrap& bootstrap, Executor& executor, StreamHandle stream);

  /// Work for the stream in front of every aligned round, outside of its events: long enough that the round's kernels
  /// are enqueued before the device gets to them, and ending on all devices at the same moment. Without it, device
  /// times include the host's share, and `wall` is meaningful.
  void put_in_front(std::function<void()> work) { in_front_ = std::move(work); }

  /// Collective. `call` enqueues the work of one round on the stream.
  Timing measure(const Rounds& rounds, const std::function<void()>& call);
  /// Collective. Two parts of a round, each between events of its own; all ranks have ended the first before any begins
  /// the second. There are no times of rounds back to back.
  std::pair<Timing, Timing> measure_parts(const Rounds& rounds, const std::function<void()>& first,
                                          const std::function<void()>& second);

 private:
  /// One aligned round: seconds by device events and by the host's clock.
  struct Round {
    double device;
    double wall;
  };
  Round run(const std::function<void()>& call);
  Timing summarise(const std::vector<Round>& rounds);
  /// Returns on all ranks at the same moment, as nearly as the host can tell.
  void align();
  /// The largest of all ranks' values, entry by entry.
  std::vector<double> slowest(const std::vector<double>& mine);

  Bootstrap& bootstrap_;
  Executor& executor_;
  StreamHandle stream_;
  std::function<void()> in_front_;
};

}  // namespace deep_ep::tools
