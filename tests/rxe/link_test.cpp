// A cable that goes down, below the verbs wire. What else goes wrong on real devices: connections_test.cpp.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "csrc/support/deadline.hpp"
#include "deep_ep/error.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/rxe/ends.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::rdma::verbs::test {
namespace {

using deep_ep::test::contains;
using deep_ep::test::message_of;

// The cable's far end goes down. These tests come last: addresses and routes suffer.
class RxeLink : public testing::Test {
 protected:
  static void shell(const std::string& command) {
    ASSERT_EQ(std::system(("bash -c '. /guest/guest_network.sh; " + command + "'").c_str()), 0) << command;
  }
};

TEST_F(RxeLink, ShortLossOfTheLinkIsSurvived) {
  PathOptions path = quick_path(1);
  path.ack_timeout = 18;  // 7.5 s until it would give up
  Ends ends(path);
  fill_pattern(ends.first.memory().first(65536), 9);
  shell("ip link set v1 down");
  std::thread repair([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    shell("cable_up");
  });
  const auto completions = run(ends.first.wire(), std::array{ends.write(1, 0, 0, 65536)}, 1);
  repair.join();
  EXPECT_EQ(completions[0].syndrome, Syndrome::none) << text(completions[0].syndrome);
  EXPECT_EQ(std::memcmp(ends.second.memory().data(), ends.first.memory().data(), 65536), 0);
}

TEST_F(RxeLink, LinkThatStaysDownEndsInRetriesExceededAndAnEvent) {
  std::mutex mutex;
  std::vector<AsyncEvent> events;
  Ends ends(quick_path(1));
  {
    AsyncEventWatcher watcher(Device::open("rxe1"), [&](const AsyncEvent& event) {
      const std::lock_guard lock(mutex);
      events.push_back(event);
    });
    shell("ip link set v1 down");
    const auto completions = run(ends.first.wire(), std::array{ends.write(1, 0, 0, 4096)}, 1);
    EXPECT_EQ(completions[0].syndrome, Syndrome::transport_retries_exceeded) << text(completions[0].syndrome);

    const std::string message = message_of<SystemError>([] { End("rxe1", 4096, 1, 16, quick_path(1)); });
    EXPECT_TRUE(contains(message, "rxe1 port 1 is DOWN, not ACTIVE")) << message;
    shell("cable_up");
    const Deadline deadline(deep_ep::test::long_patience());
    while (!deadline.expired()) {
      const std::lock_guard lock(mutex);
      if (!events.empty() && events.back().kind == AsyncEventKind::port_active) break;
    }
  }
  ASSERT_GE(events.size(), 2U);
  EXPECT_EQ(events.front().kind, AsyncEventKind::port_error);
  EXPECT_EQ(events.front().port, 1);
  EXPECT_TRUE(contains(events.front().text, "RDMA device rxe1: port error, port 1")) << events.front().text;
  EXPECT_EQ(events.back().kind, AsyncEventKind::port_active);

  // A new connection over the repaired cable works.
  Ends again(patient_path(1));
  EXPECT_EQ(run(again.first.wire(), std::array{again.write(1, 0, 0, 4096)}, 1)[0].syndrome, Syndrome::none);
}

}  // namespace
}  // namespace deep_ep::rdma::verbs::test
