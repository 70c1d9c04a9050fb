// Deadlines and masks: what control threads make of the waits that kernels report.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/control/messages.hpp"
#include "csrc/control/sockets.hpp"
#include "deep_ep/error.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/control/planes.hpp"

namespace deep_ep::control {
namespace {

using test::eventually;
using test::Planes;
using Ranks = std::vector<int>;

double timeout_s() { return deep_ep::test::scaled(0.3); }

/// Waits of kernels: each says now and then that it lasts, until it is called off.
class Waits {
 public:
  explicit Waits(Planes::Buffer& buffer, std::chrono::milliseconds between_beats = std::chrono::milliseconds(1))
      : buffer_(buffer), between_beats_(between_beats), thread_([this] { run(); }) {}
  ~Waits() {
    ends_ = true;
    thread_.join();
  }
  void begin(int rank, int peer) {
    const std::lock_guard lock(mutex_);
    waits_.push_back({rank, peer, Clock::now()});
  }
  void end(int rank, int peer) {
    const std::lock_guard lock(mutex_);
    std::erase_if(waits_, [&](const Wait& wait) { return wait.rank == rank && wait.peer == peer; });
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Wait {
    int rank, peer;
    Clock::time_point begin;
  };
  /// Beats are not in step with looks: a report that is due would meet a beat always, or never.
  void run() {
    for (int beat = 0; !ends_; ++beat) {
      {
        const std::lock_guard lock(mutex_);
        for (const Wait& wait : waits_) {
          buffer_.words[static_cast<std::size_t>(wait.rank)].say_waits(wait.peer, Clock::now() - wait.begin);
        }
      }
      std::this_thread::sleep_for(between_beats_ + beat % 7 * between_beats_ / 14);
    }
  }
  Planes::Buffer& buffer_;
  const std::chrono::milliseconds between_beats_;
  std::mutex mutex_;
  std::vector<Wait> waits_;
  std::atomic<bool> ends_ = false;
  std::thread thread_;
};

void sleep_timeouts(double number) { std::this_thread::sleep_for(std::chrono::duration<double>(number * timeout_s())); }

/// A process of the job that only says what it is told to say. Its token is the lowest, so it calls all others.
class ScriptedProcess {
 public:
  explicit ScriptedProcess(ProcessInfo like) : info_(like) {
    info_.process.words[0] = 0;
    listener_ = listen_at(unix_address_of(info_));
  }
  const ProcessInfo& info() const { return info_; }
  void connect_to(const ProcessInfo& other) {
    connections_.push_back({call_at(unix_address_of(other))});
    const Hello hello{.secret = other.secret, .from = info_.process};
    send(connections_.back(), &hello, sizeof hello);
  }
  void tell(std::size_t connection, const Report& report) {
    report.send(connections_[connection]);
    EXPECT_TRUE(connections_[connection].unsent.empty());
  }
  /// Takes some of what has come. The last report so far.
  const Report& hear(std::size_t connection) {
    connections_[connection].receive();
    Hello answer;
    if (!answered_) answered_ = connections_[connection].take(answer);
    while (answered_ && heard_.take(connections_[connection])) {
    }
    return heard_;
  }
  void end() { connections_.clear(); }

 private:
  static void send(const Connection& connection, const void* bytes, std::size_t size) {
    EXPECT_EQ(::send(connection.socket.get(), bytes, size, MSG_NOSIGNAL), static_cast<ssize_t>(size));
  }
  ProcessInfo info_;
  UniqueFd listener_;  ///< does not answer; it shows that the process lives
  std::vector<Connection> connections_;
  bool answered_ = false;
  Report heard_;
};

/// Rank 0 of a buffer with masks is such a process, connected to all others.
struct ScriptedRank {
  explicit ScriptedRank(int ranks, double timeout = timeout_s())
      : planes(ranks - 1, true), process(planes.info(0)), buffer(join(ranks, timeout)) {}

  Planes planes;
  ScriptedProcess process;
  Planes::Buffer& buffer;

 private:
  Planes::Buffer& join(int ranks, double timeout) {
    std::vector<ProcessInfo> infos{process.info()};
    Ranks of_planes{-1};
    for (int plane = 0; plane < ranks - 1; ++plane) {
      infos.push_back(planes.info(plane));
      of_planes.push_back(plane);
      process.connect_to(infos.back());
    }
    return planes.join(1, of_planes, infos, {.timeout_s = timeout, .masks = true});
  }
};

/// [plane] of a rank is the rank itself.
class WaitsTest : public testing::Test {
 protected:
  Planes::Buffer& make(int ranks, bool masks) {
    planes_.emplace(ranks, true);
    Ranks all;
    for (int rank = 0; rank < ranks; ++rank) all.push_back(rank);
    buffer_ = &planes_->join(1, all, {.timeout_s = timeout_, .masks = masks});
    return *buffer_;
  }
  int lost_for(int at, int rank) const { return buffer_->words[static_cast<std::size_t>(at)].lost_for(rank); }
  Ranks lost(int at) const {
    Ranks ranks;
    for (int rank = 0; rank < static_cast<int>(buffer_->words.size()); ++rank) {
      if (lost_for(at, rank) != kNobody) ranks.push_back(rank);
    }
    return ranks;
  }
  /// All of these come to know that exactly `expected` are lost.
  void expect_lost(const Ranks& at, const Ranks& expected) {
    for (const int rank : at) EXPECT_TRUE(eventually([&] { return lost(rank) == expected; })) << rank;
  }
  Membership& member(int rank) const { return (*buffer_)[rank]; }

  double timeout_ = timeout_s();
  std::optional<Planes> planes_;
  Planes::Buffer* buffer_ = nullptr;
};

TEST_F(WaitsTest, ASilentRankIsLostAtTheDeadline) {
  for (const bool masks : {false, true}) {
    Waits waits(make(3, masks));
    const auto begin = std::chrono::steady_clock::now();
    waits.begin(0, 2);
    waits.begin(1, 2);
    EXPECT_TRUE(eventually([&] { return lost_for(0, 2) == 2 && lost_for(1, 2) == 2; }));
    EXPECT_GE(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), timeout_s());
    const std::vector<LostRank> verdicts = member(0).lost();
    ASSERT_EQ(verdicts.size(), 1u);
    EXPECT_EQ(verdicts[0].rank, 2);
    EXPECT_EQ(verdicts[0].why, LostWhy::silent);
    EXPECT_GE(verdicts[0].waited_s, timeout_s());
    EXPECT_TRUE(eventually([&] { return lost_for(2, 2) == (masks ? 2 : kNobody); })) << "with masks rank 2 hears of it";
    planes_->end(2);
    EXPECT_TRUE(eventually([&] { return member(0).gone() == Ranks{2}; })) << "its process ends later";
  }
}

/// Waits for the same rank without a break, each of which ends in time: as kernels say.
TEST_F(WaitsTest, WaitsThatEndBeforeTheDeadlineLoseNobody) {
  test::SharedWords& words = make(2, true).words[0];
  const std::chrono::duration<double> each(0.6 * timeout_s());
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begin < 4 * each) {
    words.say_waits(1, std::chrono::duration_cast<std::chrono::nanoseconds>(each));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(lost(0), Ranks{});
}

TEST_F(WaitsTest, TheEndOfAChainIsLostAloneWhoeverReportsFirst) {
  Waits waits(make(4, true));
  waits.begin(0, 1);  // that waits itself, for the rank at the end
  waits.begin(3, 1);
  sleep_timeouts(0.5);
  waits.begin(1, 2);
  expect_lost({0, 1, 3}, {2});
  waits.end(1, 2);
  sleep_timeouts(0.5);
  expect_lost({0, 1, 3}, {2});
}

TEST_F(WaitsTest, RanksThatWaitForEachOtherLoseNobody) {
  Waits waits(make(3, true));
  waits.begin(0, 1);
  waits.begin(1, 2);
  waits.begin(2, 0);
  sleep_timeouts(2.5);
  for (const int rank : {0, 1, 2}) EXPECT_EQ(lost(rank), Ranks{});
}

/// As on a busy machine: reports are due at looks that find no new beat.
TEST_F(WaitsTest, BeatsMayComeMoreSeldomThanReportsAreDue) {
  constexpr int kRanks = test::SharedWords::kRanks;
  Waits waits(make(kRanks, true), std::chrono::milliseconds(static_cast<int>(timeout_s() * 1e3 / 7)));
  for (int rank = 0; rank < kRanks; ++rank) waits.begin(rank, rank ^ 1);
  sleep_timeouts(6);
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(lost(rank), Ranks{});
}

TEST_F(WaitsTest, BeatsMayComeMoreSeldomThanWaitsEnd) {
  Waits waits(make(3, true));
  Waits slow(*buffer_, std::chrono::milliseconds(static_cast<int>(timeout_s() * 1e3 / 3)));
  slow.begin(1, 2);
  waits.begin(0, 1);
  expect_lost({0, 1, 2}, {2});
}

TEST_F(WaitsTest, ARankThatWaitsInAnotherBufferIsNotSilent) {
  Planes planes(2, true);
  const JoinOptions options{.timeout_s = timeout_s(), .masks = true};
  Planes::Buffer& first = planes.join(1, {0, 1}, options);
  Planes::Buffer& second = planes.join(2, {0, 1}, options);
  Waits in_first(first);
  Waits in_second(second);
  in_second.begin(1, 0);
  in_first.begin(0, 1);
  sleep_timeouts(2);
  EXPECT_EQ(first.words[0].lost_for(1), kNobody);
  in_second.end(1, 0);
  EXPECT_TRUE(eventually([&] { return first.words[0].lost_for(1) == 1; }));
}

/// The ranks of both buffers are threads of one process.
TEST_F(WaitsTest, ARankMayBeSilentWhileAThreadBesideItWaitsInAnotherBuffer) {
  Planes planes(1, true);
  const JoinOptions options{.timeout_s = timeout_s(), .masks = true};
  Planes::Buffer& first = planes.join(1, {0, 0}, options);
  Planes::Buffer& second = planes.join(2, {0, 0}, options);
  Waits in_first(first);
  Waits in_second(second);
  in_second.begin(0, 1);
  in_second.begin(1, 0);
  in_first.begin(0, 1);
  EXPECT_TRUE(eventually([&] { return first.words[0].lost_for(1) == 1; }));
}

TEST_F(WaitsTest, ARankThatIsWaitedForSaysHowManyCallsItHasMade) {
  Waits waits(make(2, false));
  for (const std::size_t rank : {0, 1}) __atomic_store_n(&buffer_->words[rank].calls, 2 - rank, __ATOMIC_RELAXED);
  waits.begin(0, 1);
  const std::string text = "Rank 1 has not made the call: it has made 1 of this buffer, rank 0 has made 2";
  EXPECT_TRUE(eventually([&] { return member(0).describe_missing_call(1) == text; }));
  __atomic_store_n(&buffer_->words[1].calls, 2, __ATOMIC_RELAXED);
  EXPECT_TRUE(eventually([&] { return member(0).describe_missing_call(1).empty(); }));
}

TEST_F(WaitsTest, WithMasksARankThatHasEndedItsCallsIsLost) {
  make(3, true).words[1].end_wait_for(1);
  expect_lost({0, 1, 2}, {1});
  EXPECT_EQ(member(2).lost().front().why, LostWhy::ended);
}

/// Rank 0 is a process that answers nothing: no rank waits for it, but it is the lowest.
TEST(DecidingRank, ThatDoesNotAnswerIsFollowedByTheNext) {
  ScriptedRank decider(3);
  Planes::Buffer& buffer = decider.buffer;
  Waits waits(buffer);
  waits.begin(1, 2);
  EXPECT_TRUE(eventually([&] { return buffer.words[1].lost_for(2) == 2; }));
  EXPECT_EQ(buffer.words[1].lost_for(0), kNobody);
}

/// As a rank does that was in the other half of a network that was cut in two.
TEST(Report, TravelsInPiecesAndBehindOthers) {
  Report said{{.buffer = 5, .round = 2, .rank = 3, .gave_up_on = 9, .left = Goodbye::meets, .waits = 1}};
  said.about(1000).waited_ns = 7;
  Connection connection;
  said.send(connection);
  const std::vector<std::byte> bytes = connection.unsent;
  const auto half = bytes.begin() + sizeof(ReportHead);
  connection.received.assign(bytes.begin(), half);
  Report heard;
  EXPECT_FALSE(heard.take(connection));
  connection.received.insert(connection.received.end(), half, bytes.end());
  connection.received.insert(connection.received.end(), bytes.begin(), bytes.end());
  EXPECT_TRUE(heard.take(connection));
  EXPECT_EQ(connection.received, bytes) << "the next report";
  EXPECT_EQ(heard.round, 2U);
  EXPECT_EQ(heard.waits_for(), 1000);
  EXPECT_EQ(heard.of.size(), 1U);
}

TEST(MaskedRank, MasksNobody) {
  ScriptedRank masked(3);
  const Planes::Buffer& buffer = masked.buffer;
  Report said{{.buffer = 1, .rank = 0, .gave_up_on = 0}};
  for (const std::size_t connection : {0, 1}) masked.process.tell(connection, said);
  for (const std::size_t rank : {1, 2}) EXPECT_TRUE(eventually([&] { return buffer.words[rank].lost_for(0) == 0; }));
  said.about(2).verdict = {.rank = 2, .why = LostWhy::silent, .by = 0};
  for (const std::size_t connection : {0, 1}) masked.process.tell(connection, said);
  sleep_timeouts(0.5);
  for (const std::size_t rank : {1, 2}) EXPECT_EQ(buffer.words[rank].lost_for(2), kNobody);
}

/// Rank 1 says that it waits for rank 2, and then nothing for longer than the time-out. Rank 2 says nothing at all.
TEST_F(WaitsTest, ARankWhoseControlThreadStandsStillGetsTimeWhenTheOneThatItWaitedForIsLost) {
  for (const bool masks : {false, true}) {
    Planes planes(2, true);
    ScriptedProcess starved(planes.info(0));
    const std::vector<ProcessInfo> infos{planes.info(0), starved.info(), planes.info(1)};
    for (const std::size_t rank : {0, 2}) starved.connect_to(infos[rank]);
    Planes::Buffer& buffer = planes.join(1, {0, -1, 1}, infos, {.timeout_s = timeout_s(), .masks = masks});
    const auto lost = [&] {
      Ranks ranks;
      for (const LostRank& one : buffer[0].lost()) ranks.push_back(one.rank);
      return ranks;
    };
    Report waits_for_2{{.buffer = 1, .rank = 1}};
    waits_for_2.about(2).waited_ns = static_cast<std::int64_t>(0.2e9 * timeout_s());
    for (const std::size_t connection : {0, 1}) starved.tell(connection, waits_for_2);
    sleep_timeouts(1.5);
    Waits waits(buffer);
    waits.begin(0, 1);
    waits.begin(0, 2);
    EXPECT_TRUE(eventually([&] { return !lost().empty(); }));
    sleep_timeouts(0.4);
    EXPECT_EQ(lost(), Ranks{2});
    EXPECT_TRUE(eventually([&] { return lost() == Ranks({2, 1}); })) << "it goes on to say nothing";
  }
}

TEST_F(WaitsTest, AWaitThatIsOverAccusesNobodyWhileAnotherLasts) {
  Waits waits(make(3, true));
  waits.begin(0, 1);
  waits.begin(1, 0);  // shows that it waits itself
  sleep_timeouts(1.3);
  waits.end(0, 1);
  waits.end(1, 0);
  waits.begin(0, 2);
  waits.begin(2, 0);
  sleep_timeouts(2);  // rank 1 is silent, as no rank waits for it
  EXPECT_EQ(lost(0), Ranks{});
}

TEST_F(WaitsTest, WithoutDeadlinesOrWithFarOnesFailedPairsAreStillJudged) {
  for (const double far : {0.0, 1e300}) {
    timeout_ = far;
    Waits waits(make(3, true));
    waits.begin(0, 1);
    sleep_timeouts(1);
    EXPECT_EQ(lost(0), Ranks{});
    for (const int peer : {0, 1}) buffer_->words[2].fail_queue_to(peer);
    expect_lost({0, 1, 2}, {2});
  }
}

TEST_F(WaitsTest, ARankWhoseProgramLeavesAnotherOutIsNotBlamedByIt) {
  Waits waits(make(3, true));
  member(0).leave_out(2, true);
  waits.begin(2, 0);
  sleep_timeouts(2);
  EXPECT_EQ(lost(1), Ranks{});
  member(0).leave_out(2, false);
  expect_lost({0, 1, 2}, {0});
}

TEST_F(WaitsTest, ANicThatFailsLosesItsOwnRank) {
  Planes::Buffer& buffer = make(4, true);
  for (const int peer : {0, 1}) buffer.words[3].fail_queue_to(peer);
  buffer.words[1].fail_queue_to(3);
  expect_lost({0, 1, 2, 3}, {3});
  EXPECT_EQ(member(2).lost().front().why, LostWhy::failed);
}

TEST_F(WaitsTest, ResumingForgetsVerdictsAndLateNewsOfThem) {
  Waits waits(make(3, true));
  waits.begin(0, 2);
  expect_lost({0, 1, 2}, {2});
  waits.end(0, 2);
  const std::uint32_t before = buffer_->words[0].verdicts();
  for (const int rank : {0, 1}) member(rank).resume();
  // Rank 2 has not resumed: what it still says of its verdicts is of before.
  buffer_->words[2].fail_queue_to(1);
  sleep_timeouts(1);
  for (const int rank : {0, 1}) EXPECT_EQ(lost(rank), Ranks{});
  member(2).resume();
  EXPECT_EQ(lost(2), Ranks{});
  EXPECT_GT(buffer_->words[0].verdicts(), before);
  waits.begin(1, 2);
  expect_lost({0, 1, 2}, {2});
}

TEST_F(WaitsTest, RanksMeetAtTheEndWithoutThoseThatAreLost) {
  make(4, true);
  const auto awaited = [&](int rank) { return member(rank).awaited_at_end(); };
  for (const int rank : {0, 1}) member(rank).leave(Goodbye::meets);
  EXPECT_TRUE(eventually([&] { return awaited(0) == Ranks({2, 3}) && awaited(1) == Ranks({2, 3}); }));
  planes_->end(2);
  EXPECT_TRUE(eventually([&] { return awaited(0) == Ranks{3} && awaited(1) == Ranks{3}; }));
  member(0).leave_out(3, true);
  EXPECT_EQ(awaited(0), Ranks{});
  buffer_->leave(3);
  EXPECT_TRUE(eventually([&] { return awaited(1) == Ranks{}; }));
}

TEST_F(WaitsTest, ARankThatIsLostMeetsNobodyAtTheEnd) {
  make(3, true).words[2].end_wait_for(2);
  expect_lost({0, 1, 2}, {2});
  EXPECT_EQ(member(2).awaited_at_end(), Ranks{});
}

/// Rank 1 stops the process of rank 0 in the middle of a short wait, for twice the time-out. Its clocks go on.
TEST(WaitsOfProcesses, AStopOfTheWholeProcessIsNoWait) {
  if (deep_ep::test::under_thread_sanitizer()) GTEST_SKIP() << "ThreadSanitizer ends a forked child with threads";
  deep_ep::expect_nothing_thrown(deep_ep::run_rank_processes(2, [&](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    const auto plane = std::make_shared<Plane>(test::settings());
    test::SharedWords words;
    const Membership member(plane, 1, rank, all_gather_values(*bootstrap, plane->info(false)), words,
                            {.timeout_s = timeout_s(), .masks = true});
    const std::vector<pid_t> pids = all_gather_values(*bootstrap, ::getpid());
    bootstrap->barrier();
    if (rank == 0) {
      // Its kernels wait for 2.4 time-outs, of which it has been stopped for 2; then what they wait for has come.
      const auto begin = std::chrono::steady_clock::now();
      for (std::chrono::nanoseconds lasted{}; lasted < std::chrono::duration<double>(2.4 * timeout_s());) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        lasted = std::chrono::steady_clock::now() - begin;
        words.say_waits(1, lasted);
      }
    } else {
      sleep_timeouts(0.3);
      ::kill(pids[0], SIGSTOP);
      sleep_timeouts(2);
      ::kill(pids[0], SIGCONT);
    }
    sleep_timeouts(1);
    if (!member.lost().empty()) throw SystemError("a rank is lost");
    bootstrap->barrier();
  }));
}

TEST(SlowProcess, GetsTheLatestReportWhenItTakesThem) {
  Planes planes(1, true);
  ScriptedProcess slow(planes.info(0));
  slow.connect_to(planes.info(0));
  Planes::Buffer& buffer = planes.join(1, {-1, 0}, {slow.info(), planes.info(0)});
  for (int i = 0; i < 1000; ++i) buffer[1].leave_out(1, i % 2 == 0);  // more reports than its socket holds
  buffer[1].leave_out(0, true);
  EXPECT_TRUE(eventually([&] { return slow.hear(0).about(0).left_out != 0; }));
  buffer[1].leave_out(0, false);
  EXPECT_TRUE(eventually([&] { return slow.hear(0).of.empty(); })) << "a peer that it says nothing of";
  slow.end();
}

TEST(Report, MayNameRanksThatThereAreNot) {
  constexpr int kNone = 100'000'000;
  Report verdict{{.buffer = 1, .rank = 0}}, failed{{.buffer = 1, .rank = 0}};
  verdict.about(kNone).verdict = {.rank = kNone, .why = LostWhy::silent, .by = 0};
  failed.about(-kNone).failed = 1;
  for (const Report& said : {Report{{.buffer = 1, .rank = 0, .gave_up_on = kNone}}, verdict, failed}) {
    ScriptedRank strange(3, 0);
    const Planes::Buffer& buffer = strange.buffer;
    for (const std::size_t connection : {0, 1}) strange.process.tell(connection, said);
    strange.process.end();
    for (const std::size_t rank : {1, 2}) {  // the threads live, and hear the next thing
      EXPECT_TRUE(eventually([&] { return buffer.words[rank].lost_for(0) == 0; })) << rank;
      EXPECT_EQ(buffer.words[rank].lost_for(3 - static_cast<int>(rank)), kNobody) << rank;
    }
  }
}

/// Rank 0 decides that rank 3 is lost, and its process ends when it has told the ranks of a bit mask.
TEST(DecidingRank, ThatEndsHalfWayHasToldNobodyOrAll) {
  for (unsigned told = 0; told < 8; ++told) {
    ScriptedRank decider(4, 0);
    const Planes::Buffer& buffer = decider.buffer;
    Report lost{{.buffer = 1, .rank = 0}};
    lost.about(3).verdict = {.rank = 3, .why = LostWhy::silent, .by = 1};
    for (const std::size_t connection : {0, 1, 2}) {
      if ((told >> connection & 1u) != 0) decider.process.tell(connection, lost);
    }
    decider.process.end();
    for (const std::size_t rank : {1, 2, 3}) {
      const test::SharedWords& words = buffer.words[rank];
      EXPECT_TRUE(eventually([&] { return words.lost_for(0) == 0; })) << rank;
      // The verdict was passed on before what follows it.
      EXPECT_TRUE(eventually([&] { return (words.lost_for(3) != kNobody) == (told != 0); })) << rank << ' ' << told;
      EXPECT_EQ(words.lost_for(1), kNobody);
      EXPECT_EQ(words.lost_for(2), kNobody);
    }
  }
}

}  // namespace
}  // namespace deep_ep::control
