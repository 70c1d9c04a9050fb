// The knowledge of control threads of each other: over Unix sockets as within a host, over TCP as between hosts.
#include "csrc/control/membership.hpp"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstring>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/control/sockets.hpp"
#include "deep_ep/error.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/control/planes.hpp"
#include "tests/rdma/messages.hpp"

namespace deep_ep::control {
namespace {

using deep_ep::test::contains;
using deep_ep::test::message_of;
using deep_ep::test::says;
using test::eventually;
using test::Planes;
using test::SharedWords;

class PlaneTest : public testing::TestWithParam<bool> {
 protected:
  bool by_unix() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(By, PlaneTest, testing::Values(true, false),
                         [](const auto& info) { return info.param ? "unix" : "tcp"; });

TEST_P(PlaneTest, AnEndWithoutGoodbyeIsToldToAllRanks) {
  Planes planes(4, by_unix());
  Planes::Buffer& buffer = planes.join(1, {0, 1, 2, 3});
  planes.end(2);
  for (const int rank : {0, 1, 3}) {
    const SharedWords& words = buffer.words[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(eventually([&] { return words.lost_for(2) == 2; })) << rank;
    EXPECT_TRUE(eventually([&] { return words.verdicts() == 1; })) << rank << ": kernels look at the others after that";
    EXPECT_EQ(buffer[rank].gone(), std::vector<int>{2});
    for (const int other : {0, 1, 3}) EXPECT_EQ(words.lost_for(other), kNobody);
  }
}

TEST_P(PlaneTest, LeavingIsNotDying) {
  Planes planes(3, by_unix());
  Planes::Buffer& buffer = planes.join(1, {0, 1, 2});
  buffer.leave(1);
  planes.end(1);
  planes.end(2);  // seen after the other one, on the same connections' threads
  EXPECT_TRUE(eventually([&] { return buffer.words[0].lost_for(2) == 2; }));
  EXPECT_EQ(buffer[0].gone(), std::vector<int>{2});
  EXPECT_EQ(buffer.words[0].lost_for(1), kNobody);
}

TEST_P(PlaneTest, AGoodbyeEndsWaitsAndExchangesAsFarAsItSays) {
  for (const bool masks : {false, true}) {
    Planes planes(3, by_unix());
    Planes::Buffer& buffer = planes.join(1, {0, 1, 2}, JoinOptions{.masks = masks});
    buffer[1].leave(Goodbye::meets);
    const auto left = [&](int rank) { return __atomic_load_n(&buffer.words[0].left[rank], __ATOMIC_ACQUIRE) != 0; };
    EXPECT_TRUE(eventually([&] { return left(1); }));
    EXPECT_TRUE(buffer[0].has_left(1));
    EXPECT_EQ(buffer.words[0].lost_for(1), kNobody);
    EXPECT_EQ(buffer[0].describe_leaver(), "") << "it is still in the exchanges of destroy";
    EXPECT_EQ(buffer[0].lost().size(), masks ? 1u : 0u) << "what the log tells";
    planes.end(1);
    EXPECT_TRUE(eventually([&] { return buffer[0].gone() == std::vector<int>{1}; })) << "where it is waited for";
    buffer[2].leave(Goodbye::alone);
    EXPECT_TRUE(eventually([&] { return buffer[0].describe_leaver() == "rank 2 has left the buffer"; }));
    EXPECT_FALSE(left(0));
  }
}

TEST_P(PlaneTest, ARankThatHasLeftOneBufferIsMissedInAnother) {
  Planes planes(2, by_unix());
  Planes::Buffer& first = planes.join(1, {0, 1});
  Planes::Buffer& second = planes.join(2, {1, 0});  // the same processes, as other ranks
  first.leave(1);
  planes.end(1);
  EXPECT_TRUE(eventually([&] { return second.words[1].lost_for(0) == 0; }));
  EXPECT_EQ(first.words[0].lost_for(1), kNobody);
}

TEST_P(PlaneTest, ChainsNameTheRankAtTheirEnd) {
  Planes planes(3, by_unix());
  Planes::Buffer& buffer = planes.join(1, {0, 1, 2});
  planes.end(2);
  ASSERT_TRUE(eventually([&] { return buffer.words[1].lost_for(2) == 2; }));
  EXPECT_EQ(buffer.words[0].lost_for(1), kNobody);
  buffer.words[1].end_wait_for(2);
  EXPECT_TRUE(eventually([&] { return buffer.words[0].lost_for(1) == 2; }));
  // Rank 1 lives. Over TCP rank 0 may see the end of rank 2 later.
  EXPECT_TRUE(eventually([&] { return buffer[0].gone() == std::vector<int>{2}; }));
}

TEST_P(PlaneTest, RanksOfOneProcessHearOfEachOther) {
  Planes planes(2, by_unix());
  // ranks 0 and 2 are threads of one process
  Planes::Buffer& buffer = planes.join(1, {0, 1, 0});
  planes.end(1);
  ASSERT_TRUE(eventually([&] { return buffer.words[0].lost_for(1) == 1 && buffer.words[2].lost_for(1) == 1; }));
  buffer.words[2].end_wait_for(1);
  EXPECT_TRUE(eventually([&] { return buffer.words[0].lost_for(2) == 1; }));
}

/// This process's sockets that listen, or connections by TCP at one of their ends.
std::vector<int> own_sockets(bool listening, bool by_unix) {
  std::vector<int> found;
  for (int fd = 3; fd < 1024; ++fd) {
    int domain = 0;
    int listens = 0;
    socklen_t size = sizeof domain;
    if (::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) != 0 || (domain == AF_UNIX && !by_unix)) continue;
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || (listens != 0) != listening) continue;
    sockaddr_storage peer{};
    size = sizeof peer;
    if (listening || ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) == 0) found.push_back(fd);
  }
  return found;
}

std::vector<int> tcp_connections() { return own_sockets(false, false); }

void reset_all() {
  for (const int fd : tcp_connections()) {
    sockaddr nowhere{};
    nowhere.sa_family = AF_UNSPEC;
    ::connect(fd, &nowhere, sizeof nowhere);  // sends a reset
  }
}

TEST(PlaneOverTcp, AResetEndsNothingAndIsMadeGood) {
  if (deep_ep::test::under_thread_sanitizer()) GTEST_SKIP() << "the test uses sockets of other threads";
  Planes planes(3, false);
  Planes::Buffer& buffer = planes.join(1, {0, 1, 2});
  const std::size_t connections = tcp_connections().size();
  ASSERT_EQ(connections, 6u);  // one for each pair of processes, and both ends are here
  for (int round = 0; round < 3; ++round) {
    reset_all();
    ASSERT_TRUE(eventually([&] { return tcp_connections().size() == connections; }));
  }
  for (const int rank : {0, 1, 2}) EXPECT_EQ(buffer[rank].gone(), std::vector<int>{});
  // A goodbye is heard, if need be by the next connection, and an end without one is seen.
  reset_all();
  buffer[1].leave(Goodbye::meets);
  for (const int rank : {0, 2}) {
    EXPECT_TRUE(eventually([&] { return buffer[rank].awaited_at_end() == std::vector<int>({0, 2}); })) << rank;
  }
  buffer.leave(1);
  planes.end(1);
  planes.end(2);
  EXPECT_TRUE(eventually([&] { return buffer.words[0].lost_for(2) == 2; }));
  EXPECT_EQ(buffer.words[0].lost_for(1), kNobody);
}

/// Stands between two processes. While it is cut, nothing passes; what was sent arrives later, as packets that are sent
/// again do.
class Relay {
 public:
  explicit Relay(const SocketAddress& to) : to_(to), thread_([this] { run(); }) {}
  ~Relay() {
    ends_ = true;
    thread_.join();
  }
  const SocketAddress& address() const { return address_; }
  void cut(bool on) { cut_ = on; }

 private:
  void run() {
    std::vector<std::array<UniqueFd, 2>> connections;
    while (!ends_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (cut_) continue;
      UniqueFd caller(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (caller) connections.push_back({std::move(caller), call_at(to_)});
      for (const auto& [one, other] : connections) {
        pass_on(one.get(), other.get());
        pass_on(other.get(), one.get());
      }
    }
  }
  static void pass_on(int from, int to) {
    std::array<std::byte, 4096> bytes;
    pollfd room{.fd = to, .events = POLLOUT, .revents = 0};
    if (::poll(&room, 1, 0) != 1) return;
    const ssize_t got = ::recv(from, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got <= 0) return;
    EXPECT_EQ(::send(to, bytes.data(), static_cast<std::size_t>(got), MSG_NOSIGNAL), got);
  }
  SocketAddress to_;
  SocketAddress address_;
  UniqueFd listener_ = listen_by_tcp({}, address_);
  std::atomic<bool> cut_ = false, ends_ = false;
  std::thread thread_;
};

/// The data path is alive: each wait ends in time.
TEST(PlaneOverTcp, ACutOfTheControlNetworkLosesNobody) {
  const double timeout_s = deep_ep::test::scaled(0.3);
  for (const bool masks : {false, true}) {
    Planes planes(2, false);
    std::vector<ProcessInfo> infos{planes.info(0), planes.info(1)};
    Relay to_0(infos[0].tcp);
    Relay to_1(infos[1].tcp);
    infos[0].tcp = to_0.address();
    infos[1].tcp = to_1.address();
    Planes::Buffer& buffer = planes.join(1, {0, 1}, infos, {.timeout_s = timeout_s, .masks = masks});
    const auto make_calls = [&](double seconds) {
      const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
      while (std::chrono::steady_clock::now() < end) {
        for (const int rank : {0, 1}) {
          const auto begin = std::chrono::steady_clock::now();
          const auto lasted = [&] { return std::chrono::steady_clock::now() - begin; };
          while (lasted() < std::chrono::duration<double>(0.3 * timeout_s)) {
            buffer.words[static_cast<std::size_t>(rank)].say_waits(1 - rank, lasted());
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
        }
      }
      for (const int rank : {0, 1}) EXPECT_EQ(buffer.words[static_cast<std::size_t>(rank)].verdicts(), 0u);
    };
    const auto cut = [&](bool on) {
      to_0.cut(on);
      to_1.cut(on);
    };
    make_calls(timeout_s);
    cut(true);
    make_calls(5 * timeout_s);
    cut(false);
    make_calls(timeout_s);
    // They hear of each other as before.
    buffer.leave(0);
    buffer[1].leave(Goodbye::meets);
    EXPECT_TRUE(eventually([&] { return buffer[1].awaited_at_end().empty(); }));
    buffer.leave(1);
  }
}

/// Copies of the sockets that listen: as if something in front of the process went on to take calls when it has ended.
std::vector<UniqueFd> keep_listening(bool by_unix) {
  std::vector<UniqueFd> kept;
  for (const int fd : own_sockets(true, by_unix)) kept.emplace_back(::dup(fd));
  return kept;
}

/// Plane 0 is of another host than the rest.
std::vector<ProcessInfo> infos_of_two_hosts(Planes& planes, int number) {
  std::vector<ProcessInfo> infos;
  for (int plane = 0; plane < number; ++plane) infos.push_back(planes[plane].info(true));
  infos[0].identity.boot_id = {"another"};
  return infos;
}

TEST(PlaneOverTcp, AConnectionBetweenHostsThatEndsSaysNothingByItself) {
  Planes planes(2, true);
  Planes::Buffer& buffer = planes.join(1, {0, 1}, infos_of_two_hosts(planes, 2));
  const std::vector<UniqueFd> kept = keep_listening(false);
  planes.end(1);
  // Calls are taken, but nobody answers: that may be a proxy, or a process that will. Only time could tell.
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_EQ(buffer[0].gone(), std::vector<int>{});
}

TEST(PlaneOverTcp, AProcessOfTheOtherHostConfirmsAnEnd) {
  Planes planes(3, true);
  Planes::Buffer& buffer = planes.join(1, {0, 1, 2}, infos_of_two_hosts(planes, 3));
  const std::vector<UniqueFd> kept = keep_listening(true);
  planes.end(1);  // rank 2 finds out by the end of its connection alone
  EXPECT_TRUE(eventually([&] { return buffer.words[0].lost_for(1) == 1; }));
  EXPECT_EQ(buffer[0].gone(), std::vector<int>{1});
}

/// Nobody takes calls at such a place: the socket is there, and does not listen.
struct RefusingPlace {
  RefusingPlace() : silent(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in own{};
    own.sin_family = AF_INET;
    own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::bind(silent.get(), reinterpret_cast<const sockaddr*>(&own), sizeof own), 0);
    socklen_t size = sizeof own;
    EXPECT_EQ(::getsockname(silent.get(), reinterpret_cast<sockaddr*>(&own), &size), 0);
    there.size = sizeof own;
    std::memcpy(&there.at, &own, sizeof own);
    where = "127.0.0.1 port " + std::to_string(ntohs(own.sin_port));
  }
  UniqueFd silent;
  SocketAddress there{};
  std::string where;
};

/// Rank 0 is the one that is called. Both say who does not come through.
TEST(PlaneOverTcp, ACallThatDoesNotComeIsAnErrorThatNamesTheCaller) {
  const RefusingPlace place;
  const Settings settings{.on = true, .ports = {}, .connect_s = 0.3};
  std::array<std::shared_ptr<Plane>, 2> planes{std::make_shared<Plane>(settings), std::make_shared<Plane>(settings)};
  if (planes[0]->info(false).process < planes[1]->info(false).process) std::swap(planes[0], planes[1]);
  std::vector<ProcessInfo> infos{test::info_of(*planes[0], 0, false), test::info_of(*planes[1], 1, false)};
  const std::string own = to_string(infos[0].tcp);
  infos[0].tcp = place.there;
  std::array<std::string, 2> said;
  std::array<SharedWords, 2> words;
  std::vector<std::thread> threads;
  for (const std::size_t rank : {0, 1}) {
    threads.emplace_back([&, rank] {
      try {
        const Membership member(planes[rank], 1, static_cast<int>(rank), infos, words[rank]);
      } catch (const SystemError& error) {
        said[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_NE(said[0].find("rank 1 (process"), std::string::npos) << said[0];
  EXPECT_NE(said[0].find("did not reach rank 0 at " + own), std::string::npos) << said[0];
  EXPECT_NE(said[1].find("rank 1 did not reach rank 0 (process"), std::string::npos) << said[1];
  EXPECT_NE(said[1].find("at " + place.where), std::string::npos) << said[1];
}

TEST(PlaneOverTcp, ThePortIsAFreeOneOfTheRangeOrAnErrorNamesThem) {
  const auto port_in = [](const std::string& text) { return std::stoi(text.substr(text.rfind(' ') + 1)); };
  SocketAddress address;
  const UniqueFd taken = listen_by_tcp({}, address);
  const auto port = static_cast<std::uint16_t>(port_in(to_string(address)));
  const auto last = static_cast<std::uint16_t>(std::min(65535, port + 200));
  const UniqueFd another = listen_by_tcp({port, last}, address);
  EXPECT_GT(port_in(to_string(address)), port);
  EXPECT_LE(port_in(to_string(address)), last);
  const auto listen = [&] { Plane({.on = true, .ports = {port, port}, .connect_s = 1}).info(true); };
  EXPECT_TRUE(says(message_of<SystemError>(listen), {"port " + std::to_string(port), "DEEP_EP_CONTROL_PORTS"}));
}

TEST(ControlPorts, ARangeIsReadOrRefused) {
  EXPECT_EQ(parse_ports("4000").first, 4000);
  EXPECT_EQ(parse_ports("4000").last, 4000);
  EXPECT_EQ(parse_ports(" 4000-4010 ").first, 4000);
  EXPECT_EQ(parse_ports("4000-4010").last, 4010);
  for (const char* wrong : {"", "x", "0", "65536", "10-", "-10", "20-10", "1-2-3"}) {
    EXPECT_THROW(parse_ports(wrong), InvalidArgument) << wrong;
  }
}

/// Each rank is a thread, and has a plane. `body` gets its membership, or null.
void join_as_threads(const std::vector<std::shared_ptr<Plane>>& planes, const JoinOptions& options,
                     const std::function<void(int rank, Membership*)>& body) {
  deep_ep::expect_ranks_succeed(static_cast<int>(planes.size()), [&](const std::shared_ptr<Bootstrap>& bootstrap) {
    const int rank = bootstrap->rank();
    SharedWords words;
    const auto membership = Membership::join(planes[static_cast<std::size_t>(rank)], *bootstrap, words, options);
    body(rank, membership.get());
    bootstrap->barrier();
  });
}
std::vector<std::shared_ptr<Plane>> make_planes(int number, const Settings& settings = test::settings()) {
  std::vector<std::shared_ptr<Plane>> planes;
  for (int i = 0; i < number; ++i) planes.push_back(std::make_shared<Plane>(settings));
  return planes;
}

/// Whether it is to call the other one or to be called; long before the constructor gives up.
TEST(Plane, AProcessThatEndsWhileRanksJoinIsNamed) {
  for (const std::size_t ends : {0, 1}) {
    auto planes = make_planes(2);
    if (planes[1]->info(false).process < planes[0]->info(false).process) std::swap(planes[0], planes[1]);
    const std::vector<ProcessInfo> infos{planes[0]->info(false), planes[1]->info(false)};
    planes[ends]->stop();
    SharedWords words;
    const auto begin = std::chrono::steady_clock::now();
    const auto join = [&] { Membership(planes[1 - ends], 1, static_cast<int>(1 - ends), infos, words); };
    EXPECT_TRUE(contains(message_of<SystemError>(join), "rank " + std::to_string(ends) + " (process"));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    EXPECT_LT(took.count(), deep_ep::test::patience() / 2);
  }
}

TEST(Membership, AllRanksHaveOneUnlessItIsOffOnOne) {
  for (const bool on : {true, false}) {
    auto planes = make_planes(3);
    planes[1] = std::make_shared<Plane>(test::settings(on));
    planes.push_back(planes[0]);  // ranks may be threads of one process
    join_as_threads(planes, {}, [&](int rank, const Membership* joined) { EXPECT_EQ(joined != nullptr, on) << rank; });
  }
}

TEST(Membership, MasksNeedTheControlPlaneOnAllRanks) {
  auto planes = make_planes(3);
  planes[1] = std::make_shared<Plane>(test::settings(false));
  deep_ep::expect_ranks_succeed(3, [&](const std::shared_ptr<Bootstrap>& bootstrap) {
    SharedWords words;
    const std::shared_ptr<Plane>& plane = planes[static_cast<std::size_t>(bootstrap->rank())];
    const auto join = [&] { Membership::join(plane, *bootstrap, words, {.masks = true}); };
    EXPECT_TRUE(contains(message_of<InvalidArgument>(join), "off on rank 1"));
    bootstrap->barrier();
  });
}

TEST(Membership, RanksMeetOrOneThatWaitsLongEnoughGoesAlone) {
  std::atomic<bool> has_gone_alone = false;
  join_as_threads(make_planes(3), {.masks = true}, [&](int rank, Membership* membership) {
    if (rank == 0) {
      membership->meet(0.05);
      EXPECT_EQ(membership->awaited_at_end().back(), 2) << "it does not come yet";
      has_gone_alone = true;
    } else if (rank == 1) {
      membership->meet(0);
      EXPECT_EQ(membership->awaited_at_end(), std::vector<int>{});
      EXPECT_TRUE(has_gone_alone);
    } else {
      EXPECT_TRUE(eventually([&] { return has_gone_alone.load(); }));
      membership->meet(deep_ep::test::patience());
      EXPECT_EQ(membership->awaited_at_end(), std::vector<int>{});
    }
  });
}

/// The child of a killed process lives on. fork() has closed its copies of the descriptors of connections.
TEST_P(PlaneTest, AForkedChildThatSleepsKeepsNothingAlive) {
  if (deep_ep::test::under_thread_sanitizer()) GTEST_SKIP() << "ThreadSanitizer ends a forked child with threads";
  constexpr int kVictim = 2;
  void* const memory = ::mmap(nullptr, sizeof(pid_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto& sleeper = *static_cast<pid_t*>(memory);
  const std::vector<std::string> errors = deep_ep::run_rank_processes(kVictim + 1, [&](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    SharedWords words;
    const auto plane = std::make_shared<Plane>(test::settings());
    const std::vector<ProcessInfo> infos = all_gather_values(*bootstrap, test::info_of(*plane, rank, by_unix()));
    const Membership member(plane, 1, rank, infos, words);
    bootstrap->barrier();
    if (rank == kVictim) {
      const pid_t child = ::fork();
      if (child == 0) {
        ::alarm(600);  // should the test be killed
        for (;;) ::pause();
      }
      sleeper = child;
      ::raise(SIGKILL);
    }
    if (!eventually([&] { return words.lost_for(kVictim) == kVictim; })) throw SystemError("it is not missed");
    if (member.gone() != std::vector<int>{kVictim}) throw SystemError("others are gone, too");
  });
  for (int rank = 0; rank < kVictim; ++rank) EXPECT_EQ(errors[static_cast<std::size_t>(rank)], "") << rank;
  if (sleeper > 0) ::kill(sleeper, SIGKILL);
  ::munmap(memory, sizeof(pid_t));
}

TEST(Plane, ForkedChildrenMakeAPlaneOfTheirOwn) {
  if (deep_ep::test::under_thread_sanitizer()) GTEST_SKIP() << "ThreadSanitizer ends a forked child with threads";
  const std::shared_ptr<Plane> ours = Plane::of_process();
  EXPECT_EQ(Plane::of_process(), ours);
  const pid_t child = deep_ep::test::fork_child();
  ASSERT_GE(child, 0);
  if (child == 0) ::_exit(Plane::of_process() == ours ? 1 : 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace deep_ep::control
