// Strangers call on the places where a control thread listens: they neither hurt nor delay the job.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <filesystem>
#include <iterator>

#include "csrc/control/messages.hpp"
#include "csrc/control/sockets.hpp"
#include "tests/control/planes.hpp"

namespace deep_ep::control {
namespace {

using test::eventually;
using test::Planes;

class StrangersTest : public testing::TestWithParam<bool> {
 protected:
  /// Calls a process as another one of this machine would.
  UniqueFd call(int plane) {
    const ProcessInfo info = planes_.info(plane);
    UniqueFd socket = call_at(GetParam() ? unix_address_of(info) : info.tcp);
    pollfd ready{.fd = socket.get(), .events = POLLOUT, .revents = 0};
    ::poll(&ready, 1, static_cast<int>(1000 * deep_ep::test::patience()));
    return socket;
  }
  static void send_to(const UniqueFd& socket, const void* bytes, std::size_t size) {
    ::send(socket.get(), bytes, size, MSG_NOSIGNAL);
  }
  /// The other end has closed it, and has not said a word.
  static bool is_closed(const UniqueFd& socket) {
    char byte = 0;
    return eventually([&] {
      const ssize_t got = ::recv(socket.get(), &byte, 1, MSG_DONTWAIT);
      EXPECT_LE(got, 0) << "a caller is answered";
      return got == 0 || (got < 0 && errno != EAGAIN);
    });
  }
  /// The job is as it was: nobody is lost, new buffers are made, and an end is seen.
  void expect_health() {
    for (const int rank : {0, 1, 2}) {
      EXPECT_EQ(buffer_[rank].gone(), std::vector<int>{});
    }
    planes_.join(2, {0, 1});
    planes_.end(2);
    EXPECT_TRUE(eventually([&] { return buffer_.words[0].lost_for(2) == 2; }));
    EXPECT_EQ(buffer_.words[0].lost_for(1), kNobody);
  }
  template <class T>
  void expect_refused(const T& said) {
    const UniqueFd socket = call(called());
    send_to(socket, &said, sizeof said);
    EXPECT_TRUE(is_closed(socket));
    expect_health();
  }
  /// The hello of another process of the job to the one that all others call.
  int called() {
    int last = 0;
    for (const int plane : {1, 2}) {
      if (planes_.info(last).process.words < planes_.info(plane).process.words) last = plane;
    }
    return last;
  }
  Hello hello() {
    const int plane = called();
    return {.secret = planes_.info(plane).secret, .from = planes_.info((plane + 1) % 3).process};
  }

  Planes planes_{3, GetParam()};
  Planes::Buffer& buffer_ = planes_.join(1, {0, 1, 2});
};
INSTANTIATE_TEST_SUITE_P(By, StrangersTest, testing::Values(true, false),
                         [](const auto& info) { return info.param ? "unix" : "tcp"; });

TEST_P(StrangersTest, AWrongTokenIsClosed) {
  Hello hello = this->hello();
  hello.secret.words[0] ^= 1;
  expect_refused(hello);
}

TEST_P(StrangersTest, ASlowSilentOrVanishingCallerDelaysNobody) {
  const Hello hello = this->hello();
  for (const std::size_t bytes : {std::size_t{1}, sizeof hello - 1}) send_to(call(called()), &hello, bytes);
  const UniqueFd slow = call(called());
  const UniqueFd silent = call(called());
  send_to(slow, &hello, 1);
  expect_health();
  send_to(slow, reinterpret_cast<const char*>(&hello) + 1, 1);
}

TEST_P(StrangersTest, AFloodDelaysNobody) {
  const auto descriptors = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const auto before = descriptors();
  const ProcessInfo info = planes_.info(0);
  std::vector<UniqueFd> held;
  for (int i = 0; i < 10'000; ++i) {
    UniqueFd socket = call_at(GetParam() ? unix_address_of(info) : info.tcp);
    if (held.size() < 200) held.push_back(std::move(socket));
  }
  planes_.join(3, {0, 1});  // received behind all of these
  EXPECT_LE(descriptors() - before, 200 + 100);
  expect_health();
}

}  // namespace
}  // namespace deep_ep::control
