// A bootstrap over a transport that starts an all-gather and is then asked whether it is done. So every wait has a
// deadline, which blocking calls of other libraries have not.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/backoff.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/interrupt.hpp"

namespace deep_ep {

/// `Transport` has `name` for messages, `rank` and `size`, and
///   void start(std::span<const std::byte> mine)  begins an all-gather; `mine` stays until it is over
///   bool done(std::span<std::byte> all)          brings it further; true: all has come. Throws where it has failed
///   std::string awaited() const                  the ranks that have not come, as format_ranks has them
///   bool kIsWrittenTo                            after a failure work under way may write to its memory, which stays
/// After a failure the ranks no longer agree on what comes next, so the group is over.
template <class Transport>
std::shared_ptr<Bootstrap> make_polled_bootstrap(std::unique_ptr<Transport> transport, double timeout_s) {
  struct Group {
    ~Group() {
      if (broken && Transport::kIsWrittenTo)
        static_cast<void>(transport.release());  // NOLINT(bugprone-unused-return-value)
    }
    std::unique_ptr<Transport> transport;
    bool broken = false;
  };
  const int rank = transport->rank, size = transport->size;
  const std::shared_ptr<Group> group(new Group{.transport = std::move(transport)});
  return make_callback_bootstrap(rank, size, [=](std::span<const std::byte> mine, std::span<std::byte> all) {
    Transport& to = *group->transport;
    if (group->broken) {
      fail<TimeoutError>("bootstrap over {}: rank {} of {} failed or gave up waiting before; make a new one", to.name,
                         rank, size);
    }
    group->broken = true;  // unless all goes well
    to.start(mine);
    const Backoff wait;
    for (const Deadline deadline(timeout_s); !to.done(all); std::this_thread::sleep_for(wait.nap())) {
      if (InterruptScope::wanted()) throw Interrupted("a wait for other ranks was interrupted");
      if (!deadline.expired()) continue;
      const std::string awaited = to.awaited();
      if (to.done(all)) break;                    // this process slept, perhaps
      if (awaited == format_ranks({})) continue;  // the last has just come
      fail<TimeoutError>("bootstrap over {}: rank {} of {} waited {} s for {}", to.name, rank, size, timeout_s,
                         awaited);
    }
    group->broken = false;
  });
}

}  // namespace deep_ep
