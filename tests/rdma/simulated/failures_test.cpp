// What those who play a NIC do with entries and doorbells written by hand: also those that no device accepts.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "csrc/executor/backend.hpp"
#include "csrc/rdma/local/local_ends.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "simulation/simulated_ends.hpp"
#include "tests/kernels/test_kernel.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

using device::rdma::WorkQueueEntry;

struct Player {
  const char* name;
  std::unique_ptr<rdma::Ends> (*ends)(const std::shared_ptr<Executor>&, const SymmetricHeap&,
                                      const rdma::ConnectionOptions&);
};

/// A rank with two queue pairs to itself.
class HandWritten : public testing::TestWithParam<Player> {
 protected:
  static constexpr std::uint64_t kBytes = 4096;
  static constexpr std::uint32_t kDepth = 64;

  HandWritten()
      : heap_(backend_of(executor_)->create_heap(*bootstrap_, [](auto) { return kBytes; })),
        ends_(GetParam().ends(executor_, *heap_, {.peers = {0}, .channels = 2, .depth = kDepth, .sink = 2048})) {
    for (std::size_t end = 0; end < 2; ++end) peers_.push_back(ends_->connect(end, ends_->address(end)));
    ends_->start();
  }
  ~HandWritten() override { ends_.reset(); }

  const RdmaQueuePair& pair(std::size_t end = 0) const { return peers_[end]; }
  bool has_record() const { return pair().doorbell_record != nullptr; }  ///< else the handler `cpu` plays
  std::uint64_t* words() const { return reinterpret_cast<std::uint64_t*>(heap_->local()); }

  template <class Write>
  void post(std::size_t end, Write write, bool signalled = true) {
    WorkQueueEntry& entry = pair(end).ring[posted_[end] % kDepth];
    write(entry, posted_[end]++, pair(end).number);
    if (signalled) signal_entry(entry);
  }
  void put(std::uint64_t to, std::uint32_t bytes, std::size_t end = 0) {
    put(to, bytes, peers_[end].local_key, peers_[end].remote_key, end);
  }
  void put(std::uint64_t to, std::uint32_t bytes, std::uint32_t local_key, std::uint32_t remote_key,
           std::size_t end = 0) {
    post(end, [&](auto& entry, auto index, auto number) {
      write_entry(entry, index, number, {to, remote_key}, {0, local_key}, bytes);
    });
  }
  void add(std::uint64_t to, std::size_t end = 0) {
    post(end, [&](auto& entry, auto index, auto number) {
      fetch_add_entry(entry, index, number, {to, peers_[end].signal_key}, pair(end).sink, 5);
    });
  }
  void ring(std::size_t end = 0) { ring(end, posted_[end], posted_[end], pair(end).number); }
  void ring(std::size_t end, std::uint64_t record, std::uint64_t rung, std::uint32_t number) {
    if (!has_record()) return __atomic_store_n(pair(end).doorbell, rung, __ATOMIC_RELEASE);
    __atomic_store_n(pair(end).doorbell_record, device::rdma::record_word(record), __ATOMIC_RELEASE);
    __atomic_store_n(pair(end).doorbell, device::rdma::doorbell_word(rung, number), __ATOMIC_RELEASE);
  }
  /// Until the completion has this opcode and is that of the entry before `count`.
  void wait_for(std::uint32_t opcode, std::uint64_t count, std::size_t end = 0) const {
    const Deadline deadline(patience());
    for (;;) {
      const std::uint32_t tail = __atomic_load_n(&pair(end).completion->tail, __ATOMIC_ACQUIRE);
      if (device::rdma::tail_opcode(tail) == opcode && device::rdma::tail_counter(tail) == ((count - 1) & 0xffffu)) {
        return;
      }
      if (deadline.expired()) throw std::runtime_error("no completion of entry " + std::to_string(count - 1));
      std::this_thread::yield();
    }
  }
  void wait_until_all_is_done(std::size_t end = 0) const { wait_for(device::rdma::kCompletionOk, posted_[end], end); }

  /// The last entry fails, what comes behind it does nothing, and the other queue pair is well.
  void expect_failure(rdma::Syndrome syndrome) {
    const std::uint64_t failing = posted_[0] - 1;
    add(800);
    put(808, 8, 1);
    add(816, 1);
    words()[0] = 7;
    ring(1);
    ring();
    wait_for(device::rdma::kCompletionError, failing + 1);
    wait_until_all_is_done(1);
    EXPECT_EQ(pair().completion->syndrome, static_cast<std::uint8_t>(syndrome));
    EXPECT_TRUE(contains(ends_->failure(), fmt::format("(queue pair {:#x}, entry {}): syndrome {:#04x}", pair().number,
                                                       failing, static_cast<unsigned>(syndrome))));
    ends_.reset();  // whatever was taken is finished now
    EXPECT_EQ(words()[100], 0u) << "an entry behind the failed one was executed";
    EXPECT_EQ(words()[101], 7u);
    EXPECT_EQ(words()[102], 5u);
  }
  /// Of the last entry posted.
  std::uint32_t& word(int segment, int word) { return pair().ring[posted_[0] - 1].segment[segment].word[word]; }

  std::shared_ptr<Bootstrap> bootstrap_ = make_thread_bootstraps(1).front();
  std::shared_ptr<Executor> executor_ = make_host_executor();
  std::shared_ptr<SymmetricHeap> heap_;
  std::unique_ptr<rdma::Ends> ends_;
  std::vector<RdmaQueuePair> peers_;
  std::uint64_t posted_[2] = {};
};

template <int completion_us>
std::unique_ptr<rdma::Ends> simulated(const std::shared_ptr<Executor>& executor, const SymmetricHeap& heap,
                                      const rdma::ConnectionOptions& options) {
  return rdma::make_simulated_ends(executor, heap, options, {.completion_us = completion_us});
}
template <bool by_executor>
std::unique_ptr<rdma::Ends> local(const std::shared_ptr<Executor>& executor, const SymmetricHeap& heap,
                                  const rdma::ConnectionOptions& options) {
  return rdma::make_local_ends(executor, heap, options, {.by_executor = by_executor});
}
INSTANTIATE_TEST_SUITE_P(, HandWritten,
                         testing::Values(Player{"SimulatedPrompt", simulated<0>},
                                         Player{"SimulatedDelayed", simulated<20000>},  // completions
                                         Player{"Local", local<false>}, Player{"LocalByExecutor", local<true>}),
                         [](const auto& info) { return info.param.name; });

/// One entry tells of the end of those before it, whose words the test then reads without any order of its own.
TEST_P(HandWritten, ACompletionComesBehindTheAdditionsBeforeIt) {
  for (std::uint64_t round = 1; round <= 20; ++round) {
    for (int i = 0; i < 3; ++i) {
      const auto add = [&](auto& entry, auto index, auto number) {
        fetch_add_entry(entry, index, number, {72, peers_[0].signal_key}, pair().sink, 5);
      };
      post(0, add, false);
    }
    post(0, [](auto& entry, auto index, auto number) { write_entry(entry, index, number, {}, {}, 0); });
    ring();
    wait_until_all_is_done();
    ASSERT_EQ(words()[9], round * 15);
  }
}

/// Its bytes may come in any order, so a signal by that key could come before them.
TEST_P(HandWritten, AnAdditionByThePayloadsKeyIsRefused) {
  if (peers_[0].remote_key == peers_[0].signal_key) GTEST_SKIP() << "there is one key";
  const auto add = [&](auto& entry, auto index, auto number) {
    fetch_add_entry(entry, index, number, {72, peers_[0].remote_key}, pair().sink, 5);
  };
  post(0, add, false);
  ring();
  wait_for(device::rdma::kCompletionError, 1);
  EXPECT_EQ(pair().completion->syndrome, static_cast<std::uint8_t>(rdma::Syndrome::remote_access));
  EXPECT_EQ(words()[9], 0u);
}

/// It asks for no completion, and its failure is told all the same.
TEST_P(HandWritten, WrongRemoteKey) {
  const auto write = [&](auto& entry, auto index, auto number) {
    write_entry(entry, index, number, {64, peers_[0].remote_key ^ 0x80}, {0, peers_[0].local_key}, 8);
  };
  post(0, write, false);
  expect_failure(rdma::Syndrome::remote_access);
}

TEST_P(HandWritten, WrongLocalKey) {
  put(64, 8);
  put(64, 8, peers_[0].local_key ^ 0x80, peers_[0].remote_key);
  expect_failure(rdma::Syndrome::local_protection);
}

TEST_P(HandWritten, BeyondTheHeap) {
  put(8, 8);
  put(heap_->bytes() - 4, 8);
  expect_failure(rdma::Syndrome::remote_access);
}

TEST_P(HandWritten, FarBeyondTheHeap) {
  put(8, 8);
  put(kBytes * 1024, 1);
  expect_failure(rdma::Syndrome::remote_access);
}

TEST_P(HandWritten, FromBeyondTheHeap) {
  put(8, 8);
  post(0, [&](auto& entry, auto index, auto number) {
    write_entry(entry, index, number, {64, peers_[0].remote_key}, {heap_->bytes() - 4, peers_[0].local_key}, 8);
  });
  expect_failure(rdma::Syndrome::local_protection);
}

TEST_P(HandWritten, AdditionToTheMiddleOfAWord) {
  add(68);
  expect_failure(rdma::Syndrome::remote_invalid_request);
}

TEST_P(HandWritten, UnknownOpcode) {
  put(64, 8);
  word(0, 0) ^= device::rdma::swap32(0x04);
  expect_failure(rdma::Syndrome::local_queue_pair);
}

TEST_P(HandWritten, DoorbellBeforeItsRecord) {
  if (!has_record()) GTEST_SKIP() << "there is none";
  put(64, 8);
  ring(0, 0, 1, pair().number);
  wait_for(device::rdma::kCompletionError, 1);
  expect_failure(rdma::Syndrome::local_queue_pair);
}

}  // namespace
}  // namespace deep_ep::test
