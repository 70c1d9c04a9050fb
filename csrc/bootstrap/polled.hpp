// A bootstrap over a transport that starts an all-gather and is then asked whether it is done. So every wait has a
// deadline, which blocking calls of other libraries have not.
#pragma once

#include <memory>
#include <thread>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/backoff.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {

/// `Transport` has `name` for messages, `rank` and `size`, and
///   void start(std::span<const std::byte> mine, std::size_t bytes)  begins an all-gather, of `bytes` in all
///   bool done()                                                     is it over? Throws where it has failed
///   void take(std::span<std::byte> all)                             what has come
/// After a failure the ranks no longer agree on what comes next, so the group is over. The transport stays then: what
/// is under way may still write to its memory.
template <class Transport>
std::shared_ptr<Bootstrap> make_polled_bootstrap(std::unique_ptr<Transport> transport, double timeout_s) {
  struct Group {
    ~Group() {
      if (broken) static_cast<void>(transport.release());  // NOLINT(bugprone-unused-return-value)
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
    to.start(mine, all.size());
    const Backoff wait;
    for (const Deadline deadline(timeout_s); !to.done(); std::this_thread::sleep_for(wait.nap())) {
      WaitEnd::look_now();
      if (!deadline.expired()) continue;
      fail<TimeoutError>("bootstrap over {}: rank {} of {} waited {} s for the other ranks", to.name, rank, size,
                         timeout_s);
    }
    to.take(all);
    group->broken = false;
  });
}

}  // namespace deep_ep
