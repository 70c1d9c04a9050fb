// What ranks tell each other about one buffer never reaches another buffer, whoever has left which.
#include "csrc/bootstrap/buffer_exchanges.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "deep_ep/interrupt.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

ExchangeHeader of_rank(Purpose purpose, std::uint64_t buffer, std::uint64_t step = 0) {
  ExchangeHeader one;
  one.purpose = purpose;
  one.buffer = buffer;
  one.step = step;
  one.here = {2, 1};
  return one;
}

TEST(IsDone, AnythingElseIsAMistakeOnAllRanks) {
  const std::vector<std::vector<ExchangeHeader>> mistakes = {
      {of_rank(Purpose::destroying, 1), of_rank(Purpose::resuming, 1)},
      {of_rank(Purpose::destroying, 1), of_rank(Purpose::destroying, 2)},
      {of_rank(Purpose::making, 1, 2), of_rank(Purpose::making, 1, 3)},
      {of_rank(Purpose::making, 2), of_rank(Purpose::destroying, 1)}};
  for (const auto& ranks : mistakes) {
    for (const int rank : {0, 1}) EXPECT_THROW(is_done(ranks, rank), RankMismatch);
  }
}

/// A list that is full says nothing of older buffers.
TEST(ExchangeHeader, KnowsTheBuffersThatARankHasLeft) {
  ExchangeHeader rank;
  rank.here = {7, 5};
  for (const std::uint64_t number : {8, 6, 1}) EXPECT_TRUE(rank.has_left(number)) << number;
  for (const std::uint64_t number : {7, 5}) EXPECT_FALSE(rank.has_left(number)) << number;
  for (std::size_t i = 0; i < rank.here.size(); ++i) rank.here[i] = 200 - 2 * i;
  EXPECT_TRUE(rank.has_left(75));
  EXPECT_FALSE(rank.has_left(73));
}

void on_ranks(int size, const std::function<void(const std::shared_ptr<Bootstrap>&)>& body) {
  const auto groups = make_thread_bootstraps(size, long_patience());
  expect_nothing_thrown(run_threads(size, [&](int rank) { body(groups[static_cast<std::size_t>(rank)]); }));
}

void must(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

/// The ranks, if all of them exchange them with each other.
void meet_others(Bootstrap& exchanges) {
  const std::vector<int> all = all_gather_values(exchanges, exchanges.rank());
  for (std::size_t rank = 0; rank < all.size(); ++rank) must(all[rank] == static_cast<int>(rank), "other ranks");
}

/// The bootstrap itself would wait for much longer.
TEST(BufferExchanges, MakingABufferHasALimitThatNamesWhoIsMissing) {
  const auto groups = make_thread_bootstraps(3, long_patience());
  expect_nothing_thrown(run_threads(2, [&](int rank) {
    BufferExchanges exchanges(groups[static_cast<std::size_t>(rank)]);
    exchanges.limit_making(0.2);
    const std::string text = message_of<TimeoutError>([&] { exchanges.barrier(); });
    must(text.starts_with("exchange: rank " + std::to_string(rank) +
                          " of 3 waited 0.2 s for other ranks, making a new") &&
             text.ends_with("order? It waits for rank 2"),
         text);
  }));
}

/// A callback in another language makes an error of its own of what ends its wait.
TEST(BufferExchanges, ARankThatHasLeftKeepsItsKindThroughACallback) {
  BufferExchanges exchanges(make_callback_bootstrap(0, 2, [](auto, auto) {
    try {
      while (!InterruptScope::wanted()) std::this_thread::yield();
    } catch (const std::exception& error) {
      throw std::runtime_error(error.what());
    }
  }));
  int looks = 0;
  exchanges.end_waits_by([&] {
    if (++looks > 1) throw PeerLeft("rank 1 has left");
  });
  EXPECT_THROW(exchanges.barrier(), PeerLeft);
}

TEST(BufferExchanges, SmallAndLargeMessages) {
  on_ranks(3, [](const std::shared_ptr<Bootstrap>& group) {
    BufferExchanges exchanges(group);
    for (const std::size_t bytes : {0, 1, 3000, 4096, 20000}) {
      const std::vector<std::byte> mine(bytes, static_cast<std::byte>(group->rank() + 1));
      const std::vector<std::byte> all = exchanges.all_gather(mine);
      must(all.size() == 3 * bytes, "another size");
      for (std::size_t i = 0; i < all.size(); ++i) {
        must(all[i] == static_cast<std::byte>(i / bytes + 1), "other bytes");
      }
    }
    message_of<RankMismatch>([&] { exchanges.all_gather(std::vector<std::byte>(group->rank() == 1 ? 8 : 16)); });
  });
}

/// One rank alone has seen an error: it leaves and makes the next buffer, while the others are in the collective end.
TEST(BufferExchanges, ARankThatLeftIsNotWaitedForAndGetsItsNextBuffer) {
  on_ranks(3, [](const std::shared_ptr<Bootstrap>& group) {
    for (int round = 0; round < 6; ++round) {
      BufferExchanges buffer(group);
      meet_others(buffer);
      meet_others(buffer);
      if (group->rank() == round % 3) continue;
      buffer.begin(Purpose::destroying);
      const std::string text = message_of<PeerLeft>([&] { buffer.barrier(); });
      must(text.find("rank " + std::to_string(round % 3) + " has left buffer") == 0, text);
      must(text.find("destroying buffer") != std::string::npos, text);
    }
    BufferExchanges last(group);
    meet_others(last);
  });
}

/// A constructor that failed on one rank between two exchanges.
TEST(BufferExchanges, ARankThatLeftWhileABufferWasMade) {
  on_ranks(2, [](const std::shared_ptr<Bootstrap>& group) {
    {
      BufferExchanges half_made(group);
      meet_others(half_made);
      if (group->rank() == 1) message_of<PeerLeft>([&] { meet_others(half_made); });
    }
    BufferExchanges buffer(group);
    meet_others(buffer);
  });
}

TEST(BufferExchanges, AStepThatFailsOnOneRankFailsOnAllInTheirNextExchange) {
  on_ranks(2, [](const std::shared_ptr<Bootstrap>& group) {
    BufferExchanges buffer(group);
    meet_others(buffer);
    buffer.agree("boiling water", [] {});
    if (group->rank() == 0) {
      const std::string text = message_of<InvalidArgument>(
          [&] { buffer.agree("boiling water", [] { throw InvalidArgument("no kettle"); }); });
      must(text == "no kettle", text);
    } else {
      buffer.agree("boiling water", [] {});
      const std::string text = message_of<SystemError>([&] { buffer.all_gather(std::vector<std::byte>(10000)); });
      must(text == "boiling water failed on rank 0: no kettle", text);
    }
    meet_others(buffer);  // the ranks are still in step
  });
}

/// A step may have exchanges. No rank waits to tell of one that has failed.
TEST(BufferExchanges, AnExchangeThatFailedIsNotToldOf) {
  int gathers = 0;
  BufferExchanges buffer(make_callback_bootstrap(0, 2, [&](auto, auto) {
    ++gathers;
    throw std::domain_error("cable unplugged");
  }));
  message_of<std::domain_error>([&] { buffer.agree("boiling water", [&] { meet_others(buffer); }); });
  EXPECT_EQ(gathers, 1);
}

TEST(BufferExchanges, WhatTheProgramExchangesItselfIsNotTakenForAnExchange) {
  on_ranks(2, [](const std::shared_ptr<Bootstrap>& group) {
    BufferExchanges buffer(group);
    if (group->rank() == 0) {
      group->all_gather(std::vector<std::byte>(4096));
      return;
    }
    const std::string text = message_of<RankMismatch>([&] { meet_others(buffer); });
    must(text.find("rank 1 got from rank 0 what is no exchange of a buffer") != std::string::npos, text);
  });
}

/// Ranks 0 and 1 meet, then rank 1 stays away.
TEST(BufferExchanges, AWaitEndsForARankThatWillNotCome) {
  std::atomic<bool> looked = false;
  std::atomic<bool> gone = false;
  std::atomic<bool> over = false;
  on_ranks(2, [&](const std::shared_ptr<Bootstrap>& group) {
    BufferExchanges buffer(group);
    meet_others(buffer);
    if (group->rank() == 1) {  // it goes when rank 0 has looked before its wait
      while (!looked) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      for (gone = true; !over;) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    buffer.end_waits_by([&] {
      if (gone) throw PeerLeft("the process of rank 1 has ended");
      looked = true;
    });
    buffer.begin(Purpose::destroying);
    message_of<PeerLeft>([&] { meet_others(buffer); });
    over = true;
  });
}

TEST(BufferExchanges, AWaitEndsWhereTheCallerWantsIt) {
  const auto bootstraps = make_thread_bootstraps(2, long_patience());
  BufferExchanges buffer(bootstraps[0]);
  const InterruptScope scope([] { return true; });
  EXPECT_EQ(message_of<Interrupted>([&] { meet_others(buffer); }), "a wait for other ranks was interrupted");
}

TEST(BufferExchanges, RanksThatHaveNotCountedAlikeAgreeOnANumber) {
  const auto below = make_thread_bootstraps(2, long_patience());
  expect_nothing_thrown(run_threads(2, [&](int rank) {
    bool interrupted = rank == 0;
    const auto group = make_callback_bootstrap(rank, 2, [&](auto mine, auto all) {
      if (std::exchange(interrupted, false)) throw std::runtime_error("Ctrl-C");
      const std::vector<std::byte> gathered = below[static_cast<std::size_t>(rank)]->all_gather(mine);
      std::copy(gathered.begin(), gathered.end(), all.begin());
    });
    if (rank == 0) {
      BufferExchanges given_up(group);
      message_of<std::runtime_error>([&] { meet_others(given_up); });
    }
    for (int round = 0; round < 3; ++round) {
      BufferExchanges buffer(group);
      meet_others(buffer);
      BufferExchanges beside(group);
      meet_others(beside);
      buffer.begin(Purpose::destroying);
      meet_others(buffer);
    }
  }));
}

}  // namespace
}  // namespace deep_ep::test
