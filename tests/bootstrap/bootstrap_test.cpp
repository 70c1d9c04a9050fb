#include "deep_ep/bootstrap.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <thread>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/bootstrap/polled.hpp"
#include "csrc/support/deadline.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/interrupt.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/support/setting.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep {
namespace {

using std::chrono::steady_clock;
using test::patience;
using test::scaled;

double seconds_since(steady_clock::time_point begin) {
  return std::chrono::duration<double>(steady_clock::now() - begin).count();
}

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

std::vector<std::byte> pattern(int rank, int round, std::size_t bytes) {
  std::vector<std::byte> result(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    result[i] = static_cast<std::byte>(static_cast<std::size_t>(rank * 31 + round * 7) + i * 13 + i / 251);
  }
  return result;
}

// Many rounds of many sizes, zero and more than one chunk of shared memory included.
void exercise(Bootstrap& bootstrap) {
  for (int round = 0; round < 40; ++round) {
    const std::size_t bytes = round % 8 == 7 ? 50000 : static_cast<std::size_t>(round % 5) * 100;
    const std::vector<std::byte> all = bootstrap.all_gather(pattern(bootstrap.rank(), round, bytes));
    std::vector<std::byte> expected;
    for (int rank = 0; rank < bootstrap.size(); ++rank) {
      const std::vector<std::byte> part = pattern(rank, round, bytes);
      expected.insert(expected.end(), part.begin(), part.end());
    }
    require(all == expected, "all_gather returned other bytes than the ranks gave");
    if (round % 3 == 0) bootstrap.barrier();
  }
}

TEST(ThreadBootstrap, GathersInRankOrderAnyNumberOfTimes) {
  for (const int size : {1, 2, 3, 8}) {
    const auto bootstraps = make_thread_bootstraps(size, patience());
    expect_nothing_thrown(run_threads(size, [&](int rank) {
      Bootstrap& bootstrap = *bootstraps[static_cast<std::size_t>(rank)];
      require(bootstrap.rank() == rank && bootstrap.size() == size, "wrong rank or size");
      exercise(bootstrap);
    }));
  }
}

TEST(ThreadBootstrap, DeadlineNamesWhoIsMissingAndEndsTheGroup) {
  const double deadline = scaled(1);  // ranks 0 and 2 come within it, or one of them would be missed, too
  const auto bootstraps = make_thread_bootstraps(4, deadline);
  const auto begin = steady_clock::now();
  const auto errors = run_threads(4, [&](int rank) {
    Bootstrap& bootstrap = *bootstraps[static_cast<std::size_t>(rank)];
    bootstrap.barrier();  // all of them
    if (rank % 2 == 0) bootstrap.barrier();
  });
  for (const std::size_t rank : {0u, 2u}) {
    EXPECT_NE(errors[rank].find("for ranks 1 and 3"), std::string::npos) << errors[rank];
  }
  EXPECT_GE(seconds_since(begin), 0.95 * deadline);
  const auto later = run_threads(4, [&](int rank) { bootstraps[static_cast<std::size_t>(rank)]->barrier(); });
  for (const std::size_t rank : {0u, 2u}) {
    EXPECT_NE(later[rank].find("gave up waiting before"), std::string::npos) << later[rank];
  }
}

TEST(ThreadBootstrap, WaitsAsLongAsTheEnvironmentSays) {
  const Setting timeout("DEEP_EP_TIMEOUT_S", "0.2");
  const auto wait = [] { make_thread_bootstraps(2)[0]->barrier(); };
  EXPECT_TRUE(test::contains(test::message_of<TimeoutError>(wait), "waited 0.2 s for rank 1"));
}

TEST(Bootstrap, RefusesATimeoutThatIsNone) {
  for (const double timeout_s : {-1.0, std::nan(""), HUGE_VAL}) {
    const auto make = [&] { make_thread_bootstraps(1, timeout_s); };
    EXPECT_TRUE(test::contains(test::message_of<InvalidArgument>(make), "timeout_s is ")) << timeout_s;
  }
}

TEST(Bootstrap, ATimeoutBelowTheLeastIsNotForEver) {
  EXPECT_EQ(timeout_in_effect(1e-10), 1e-6);
  EXPECT_EQ(timeout_in_effect(0.0), 0);
}

TEST(Bootstrap, RefusesARankThatThereIsNot) {
  const auto function = [](std::span<const std::byte>, std::span<std::byte>) {};
  for (const auto& [rank, size] : {std::pair{2, 2}, {-1, 2}, {0, 0}}) {
    EXPECT_THROW(make_callback_bootstrap(rank, size, function), InvalidArgument) << rank << " of " << size;
  }
}

TEST(CallbackBootstrap, ItsExceptionsReachTheCaller) {
  const auto bootstrap = make_callback_bootstrap(
      0, 2, [](std::span<const std::byte>, std::span<std::byte>) { throw std::domain_error("cable unplugged"); });
  EXPECT_THROW(bootstrap->barrier(), std::domain_error);
  EXPECT_THROW(make_callback_bootstrap(0, 1, nullptr), InvalidArgument);
}

/// The gather of one rank, done after `looks`.
struct FakeTransport {
  static constexpr const char* name = "fakes";
  static constexpr bool kIsWrittenTo = true;
  explicit FakeTransport(int looks) : left(looks) { ++alive; }
  ~FakeTransport() { --alive; }
  FakeTransport(const FakeTransport&) = delete;
  FakeTransport& operator=(const FakeTransport&) = delete;
  static constexpr int rank = 0, size = 1;
  void gather(std::span<const std::byte> mine, std::span<std::byte> all, const RankWait& wait) {
    wait.until([&] { return left != 0 && --left != 0 ? "a fake" : ""; });
    std::ranges::copy(mine, all.begin());
  }

  int left;
  inline static int alive = 0;
};

TEST(PolledBootstrap, WaitsUntilTheTransportIsDone) {
  exercise(*make_polled_bootstrap(std::make_unique<FakeTransport>(3), patience()));
  EXPECT_EQ(FakeTransport::alive, 0);
}

TEST(PolledBootstrap, ARankThatComesAtTheDeadlineIsNotLate) {
  int looks = 0;
  RankWait{"fakes", 0, 2, Deadline(0.01)}.until([&] {
    if (++looks == 2) return "";
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return "rank 1";
  });
  EXPECT_EQ(looks, 2);
}

TEST(PolledBootstrap, AFailureEndsTheGroupAndLeavesTheTransport) {
  enum class By { deadline, peer, interruption };
  for (const By by : {By::deadline, By::peer, By::interruption}) {
    auto transport = std::make_unique<FakeTransport>(-1);
    const std::unique_ptr<FakeTransport> stays(transport.get());
    const auto bootstrap = make_polled_bootstrap(std::move(transport), by == By::deadline ? 0.01 : patience());
    if (by == By::deadline) {
      EXPECT_THROW(bootstrap->barrier(), TimeoutError);
    } else if (by == By::peer) {
      const InterruptScope wait([]() -> bool { throw PeerLeft("the process of rank 1 has ended"); });
      EXPECT_THROW(bootstrap->barrier(), PeerLeft);
    } else {
      const InterruptScope wait([] { return true; });
      EXPECT_THROW(bootstrap->barrier(), Interrupted);
    }
    stays->left = 0;
    EXPECT_THROW(bootstrap->barrier(), TimeoutError) << "though the transport is done now";
  }
  EXPECT_EQ(FakeTransport::alive, 0) << "freed here, not by the group";
}

TEST(CallbackBootstrap, AnExceptionOfAnyClassIsAnError) {
  const auto bootstrap = make_callback_bootstrap(0, 1, [](auto, auto) { throw 42; });
  try {
    bootstrap->barrier();
    ADD_FAILURE() << "the all-gather failed";
  } catch (const SystemError& error) {
    EXPECT_NE(std::string(error.what()).find("all_gather must throw a std::exception"), std::string::npos);
  }
}

}  // namespace
}  // namespace deep_ep
