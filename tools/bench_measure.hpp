// Times of work that all ranks do together.
#pragma once

#include <functional>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::tools {

/// Seconds. A round's time is that of its slowest rank.
struct Timing {
  double median = 0;  ///< of aligned rounds: from an event before the call to one behind its last kernel
  double fastest = 0;
  double slowest = 0;
  double wall = 0;          ///< median of the same rounds by the host's clock: from the call to the end of its kernels
  double back_to_back = 0;  ///< mean of rounds enqueued one behind the other, without the host waiting in between
};

struct Rounds {
  int warmup = 10;
  int count = 30;
};

class Meter {
 public:
  Meter(Bootstrap& bootstrap, Executor& executor, StreamHandle stream);

  /// Collective. `call` enqueues the work of one round on the stream.
  Timing measure(const Rounds& rounds, const std::function<void()>& call);

 private:
  /// Returns on all ranks at the same moment, as nearly as the host can tell.
  void align();
  /// The largest of all ranks' values, entry by entry.
  std::vector<double> slowest(const std::vector<double>& mine);

  Bootstrap& bootstrap_;
  Executor& executor_;
  StreamHandle stream_;
};

}  // namespace deep_ep::tools
