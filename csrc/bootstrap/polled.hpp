// A bootstrap over a transport that asks whether others have come. So every wait has a deadline, which blocking calls
// of other libraries have not.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <thread>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/backoff.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/interrupt.hpp"

namespace deep_ep {

/// The waits of one all-gather.
struct RankWait {
  const char* over;
  int rank, size;
  Deadline deadline;

  /// `awaited()` brings the all-gather further, and names the ranks that have not come; empty: all have.
  template <class Awaited>
  void until(const Awaited& awaited) const {
    const Backoff wait;
    for (std::string ranks; !(ranks = awaited()).empty(); std::this_thread::sleep_for(wait.nap())) {
      try {
        if (InterruptScope::wanted()) throw Interrupted("a wait for other ranks was interrupted");
      } catch (const TimeoutError& late) {  // a limit of the caller, who does not know for whom this waits
        fail<TimeoutError>("{} It waits for {}", late.what(), ranks);
      }
      if (!deadline.expired()) continue;
      ranks = awaited();
      if (ranks.empty()) return;  // this process slept, perhaps
      fail<TimeoutError>("bootstrap over {}: rank {} of {} waited {} s for {}", over, rank, size, deadline.seconds(),
                         ranks);
    }
  }
};

/// `Transport` has `name` for messages, `rank` and `size`, and
///   void gather(std::span<const std::byte> mine, std::span<std::byte> all, const RankWait& wait)
///   bool kIsWrittenTo   after a failure work under way may write to its memory, which stays
/// After a failure the ranks no longer agree on what comes next, so the group is over.
template <class Transport>
std::shared_ptr<Bootstrap> make_polled_bootstrap(std::unique_ptr<Transport> transport, double timeout_s) {
  const int rank = transport->rank, size = transport->size;
  const auto broken = std::make_shared<bool>(false);
  const std::shared_ptr<Transport> to(transport.release(), [broken](Transport* ends) {
    if (!*broken || !Transport::kIsWrittenTo) delete ends;
  });
  return make_callback_bootstrap(rank, size, [=](std::span<const std::byte> mine, std::span<std::byte> all) {
    if (*broken) {
      fail<TimeoutError>("bootstrap over {}: rank {} of {} failed or gave up waiting before; make a new one",
                         Transport::name, rank, size);
    }
    *broken = true;  // unless all goes well
    to->gather(mine, all, RankWait{Transport::name, rank, size, Deadline(timeout_s)});
    *broken = false;
  });
}

}  // namespace deep_ep
