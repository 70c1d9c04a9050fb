// Receive hooks of low-latency dispatch: late, in any order, two at once, never.
#include <gtest/gtest.h>

#include <sys/wait.h>

#include <functional>
#include <thread>

#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_case.hpp"
#include "tests/cluster/recording_executor.hpp"
#include "tests/support/child_process.hpp"

namespace deep_ep::test {
namespace {

class LowLatencyHooksTest : public ClusterTest {
 protected:
  static BufferOptions options() { return low_latency_options(2, 8, 1024); }
  static LowLatencyDispatchResult send(Rank& rank, Buffer& buffer, const LowLatencyCase& one) {
    return buffer.low_latency_dispatch(with_hook(upload_arguments(rank, one)), rank.call());
  }

  /// They differ in everything that decides where rows lie.
  const std::vector<LowLatencyCase> cases_ = {
      make_low_latency_case({.tokens = {5, 3}, .max_tokens = 6, .hidden = 512, .topk = 3, .seed = 1}),
      make_low_latency_case(
          {.tokens = {2, 4}, .max_tokens = 4, .hidden = 1024, .topk = 2, .format = oracle::RowFormat::bf16, .seed = 2}),
      make_low_latency_case(
          {.tokens = {0, 6}, .max_tokens = 6, .hidden = 128, .local_experts = 2, .topk = 3, .seed = 3})};
};
DEEP_EP_LOW_LATENCY_ON_THREADS(LowLatencyHooksTest);

/// Which of two calls is received first, and when, is each rank's own business.
TEST_P(LowLatencyHooksTest, TwoInFlightInAnyOrder) {
  run_with_buffers(cluster(2), options(), [&](Rank& rank, Buffer& buffer) {
    for (std::size_t round = 0; round < 12; ++round) {
      const LowLatencyCase& first = cases_[round % 3];
      const LowLatencyCase& second = cases_[(round + 1) % 3];
      const auto a = send(rank, buffer, first);
      const auto b = send(rank, buffer, second);
      if ((round + static_cast<std::size_t>(rank.rank())) % 2 == 0) {
        b.hook();
        check_low_latency_dispatch(rank, second, b);
        a.hook();
      } else {
        a.hook();
        check_low_latency_dispatch(rank, first, a);
        b.hook();
      }
      check_low_latency_dispatch(rank, first, a);
      check_low_latency_dispatch(rank, second, b);
    }
    buffer.check();
  });
}

TEST_P(LowLatencyHooksTest, AThirdWithoutHookIsRefused) {
  run_with_buffers(cluster(2), options(), [&](Rank& rank, Buffer& buffer) {
    const auto a = send(rank, buffer, cases_[0]);
    const auto b = send(rank, buffer, cases_[1]);
    require_throws<InvalidArgument>([&] { send(rank, buffer, cases_[2]); }, {"low_latency_dispatch", "2 calls", "hook"},
                                    "a third call");
    a.hook();
    const auto c = send(rank, buffer, cases_[2]);
    c.hook();  // receives b first
    check_low_latency_dispatch(rank, cases_[0], a);
    check_low_latency_dispatch(rank, cases_[1], b);
    check_low_latency_dispatch(rank, cases_[2], c);
  });
}

/// The last owner of what a call used is the queue of hooks; its end may be the program's.
TEST_P(LowLatencyHooksTest, AnOwnerMayCallAnotherHookAtItsEnd) {
  run_with_buffers(cluster(2), options(), [&](Rank& rank, Buffer& buffer) {
    std::function<void()> other;
    LowLatencyDispatchArguments first = with_hook(upload_arguments(rank, cases_[0]));
    first.owner = {static_cast<void*>(nullptr), [&](void*) { other(); }};
    const auto a = buffer.low_latency_dispatch(first, rank.call());
    const auto b = send(rank, buffer, cases_[1]);
    other = b.hook;
    first.owner.reset();
    a.hook();  // receives b, too
    check_low_latency_dispatch(rank, cases_[0], a);
    check_low_latency_dispatch(rank, cases_[1], b);
    check_low_latency_dispatch(rank, cases_[2],
                               buffer.low_latency_dispatch(upload_arguments(rank, cases_[2]), rank.call()));
  });
}

/// The hook's own memory is the last owner of the buffer.
TEST_P(LowLatencyHooksTest, MayOwnTheBuffer) {
  run_cluster(cluster(2), [&](Rank& rank) {
    auto buffer = std::make_shared<Buffer>(rank.bootstrap(), rank.executor(), options());
    const std::weak_ptr<Buffer> watched = buffer;
    LowLatencyDispatchArguments arguments = with_hook(upload_arguments(rank, cases_[0]));
    arguments.owner = buffer;
    const auto result = buffer->low_latency_dispatch(arguments, rank.call());
    arguments.owner.reset();
    buffer.reset();
    require(!watched.expired(), "the hook owns the buffer");
    result.hook();
    require(watched.expired(), "the hook has let go of the buffer");
    check_low_latency_dispatch(rank, cases_[0], result);
    require_throws<UseAfterDestroy>([&] { result.hook(); }, {"hook"}, "a hook after the buffer");
  });
}

/// Then the buffer may end, too.
TEST_P(LowLatencyHooksTest, WhatAHookHoldsEndsBehindItsCall) {
  run_with_buffers(cluster(2), options(), [&](Rank& rank, Buffer& buffer) {
    std::string refusal = "the owner has not ended";
    LowLatencyDispatchArguments arguments = with_hook(upload_arguments(rank, cases_[0]));
    arguments.owner = {static_cast<void*>(nullptr), [&](void*) {
                         std::thread([&] {
                           try {
                             buffer.check(false);
                             refusal.clear();
                           } catch (const Error& error) {
                             refusal = error.what();
                           }
                         }).join();
                       }};
    const auto result = buffer.low_latency_dispatch(arguments, rank.call());
    arguments.owner.reset();
    result.hook();
    require(refusal.empty(), refusal);
    check_low_latency_dispatch(rank, cases_[0], result);
  });
}

TEST_P(LowLatencyHooksTest, AreTheParentsInAForkedChild) {
  if (under_thread_sanitizer()) GTEST_SKIP() << "ThreadSanitizer ends a forked child with threads";
  run_with_buffers(cluster(2), options(), [&](Rank& rank, Buffer& buffer) {
    const auto result = send(rank, buffer, cases_[0]);
    const pid_t child = fork_child();
    if (child == 0) {
      try {
        result.hook();
      } catch (const Error& error) {
        ::_exit(std::string(error.what()).find("in a child forked after the buffer was made") != std::string::npos ? 0
                                                                                                                   : 2);
      }
      ::_exit(1);
    }
    int status = -1;
    require(::waitpid(child, &status, 0) == child && status == 0, "a hook in a forked child is refused");
    result.hook();
    check_low_latency_dispatch(rank, cases_[0], result);
  });
}

/// A call that receives at once receives what waits before it; a hook that is never called harms nobody.
TEST_P(LowLatencyHooksTest, NeverCalled) {
  run_cluster(cluster(2), [&](Rank& rank) {
    Buffer& buffer = rank.buffer(options());
    for (std::size_t round = 0; round < 6; ++round) {
      send(rank, buffer, cases_[round % 3]);  // dropped, hook and all
      if (round % 2 == 1) {
        const LowLatencyCase& one = cases_[(round + 1) % 3];
        check_low_latency_dispatch(rank, one, buffer.low_latency_dispatch(upload_arguments(rank, one), rank.call()));
      }
    }
    const auto last = send(rank, buffer, cases_[0]);
    buffer.check();
    buffer.destroy();
    require_throws<UseAfterDestroy>([&] { last.hook(); }, {"hook"}, "a hook after destroy");
  });
}

/// A graph with only one part of a call would wait, when replayed, for something that nobody sends.
TEST_P(LowLatencyHooksTest, BothPartsOfACallAreRecordedOrNeither) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "recordings are played by the CPU";
  run_cluster(cluster(2), [&](Rank& rank) {
    const auto executor = std::make_shared<RecordingExecutor>(rank.executor());
    Buffer buffer(rank.bootstrap(), executor, options());
    const auto receive = [&](const LowLatencyDispatchResult& result, bool recorded) {
      executor->recording = recorded;
      result.hook();
    };
    for (const bool recorded : {false, true}) {
      executor->recording = recorded;
      const auto result = send(rank, buffer, cases_[0]);
      require_throws<InvalidArgument>([&] { receive(result, !recorded); },
                                      {"low_latency_dispatch", recorded ? "was recorded" : "was not recorded", "graph"},
                                      "a hook on the other side of the recording's edge");
      executor->recording = !recorded;
      require_throws<InvalidArgument>(
          [&] { buffer.low_latency_dispatch(upload_arguments(rank, cases_[1]), rank.call()); }, {"graph"},
          "a call that receives what was sent before");
      receive(result, recorded);
      executor->recording = false;
      check_low_latency_dispatch(rank, cases_[0], result);
    }
    buffer.check();
    buffer.destroy();
  });
}

}  // namespace
}  // namespace deep_ep::test
