// The verbs wire on real RoCE devices: what must arrive does arrive, on every cable, even when packets are lost.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>

#include <array>
#include <cstring>
#include <set>

#include "csrc/support/deadline.hpp"
#include "deep_ep/error.hpp"
#include "tests/rxe/ends.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::rdma::verbs::test {
namespace {

class RxeTransport : public testing::TestWithParam<Cable> {};

INSTANTIATE_TEST_SUITE_P(On, RxeTransport,
                         testing::Values(Cable{"one_device", "rxe0", "rxe0", 1}, Cable{"ipv4", "rxe0", "rxe1", 1},
                                         Cable{"ipv6", "rxe0", "rxe1", 0}),
                         [](const auto& info) { return info.param.name; });

TEST_P(RxeTransport, WritesArriveAndTouchNothingElse) {
  Ends ends(GetParam());
  constexpr std::size_t kHalf = std::size_t{2} << 20;
  fill_pattern(ends.first.memory(), 1);
  for (const std::uint32_t bytes : {1U, 8U, 4099U, 1U << 20}) {
    std::memset(ends.second.memory().data(), 0, kHalf);
    const auto completions = run(ends.first.wire(), std::array{ends.write(bytes, 77, 129, bytes)}, 1);
    EXPECT_EQ(completions[0].id, bytes);
    EXPECT_EQ(completions[0].queue_pair, ends.first.pair(0).number());
    ASSERT_EQ(completions[0].syndrome, Syndrome::none) << text(completions[0].syndrome);
    EXPECT_EQ(std::memcmp(ends.second.memory().data() + 129, ends.first.memory().data() + 77, bytes), 0);
    EXPECT_EQ(ends.second.memory()[128], std::byte{0});
    EXPECT_EQ(ends.second.memory()[129 + bytes], std::byte{0});
  }
}

TEST_P(RxeTransport, InlineWritesOfEveryLength) {
  Ends ends(GetParam());
  std::array<std::byte, kMaxInlineBytes> bytes;
  for (std::uint32_t length = 0; length <= kMaxInlineBytes; ++length) {
    fill_pattern(bytes, length);
    std::memset(ends.second.memory().data(), 0, 64);
    const WireOperation operation = ends.write_inline(length, std::span(bytes).first(length), 16);
    ASSERT_EQ(run(ends.first.wire(), std::array{operation}, 1)[0].syndrome, Syndrome::none);
    EXPECT_EQ(std::memcmp(ends.second.memory().data() + 16, bytes.data(), length), 0) << length;
    EXPECT_EQ(ends.second.memory()[16 + length], std::byte{0}) << length;
  }
}

TEST_P(RxeTransport, FetchAddsOfSeveralQueuePairsAllCount) {
  constexpr int kPairs = 4;
  constexpr std::uint64_t kAdds = 25;
  Ends ends(GetParam(), {.bytes = 65536, .queue_pairs = kPairs});
  std::vector<WireOperation> operations;
  for (std::uint64_t i = 0; i < kAdds * kPairs; ++i) {
    WireOperation operation = ends.fetch_add(i, 4096, 1);
    operation.queue_pair = ends.first.pair(static_cast<int>(i % kPairs)).number();
    operation.local_address = 8 * i;
    operations.push_back(operation);
  }
  for (const WireCompletion& completion : run(ends.first.wire(), operations, operations.size())) {
    ASSERT_EQ(completion.syndrome, Syndrome::none);
  }
  EXPECT_EQ(ends.second.word(4096), kAdds * kPairs);
  std::set<std::uint64_t> old_values;
  for (std::uint64_t i = 0; i < kAdds * kPairs; ++i) old_values.insert(ends.first.word(8 * i));
  EXPECT_EQ(old_values.size(), kAdds * kPairs);
  EXPECT_EQ(*old_values.rbegin(), kAdds * kPairs - 1);
}

TEST_P(RxeTransport, SignalIsSeenBehindItsData) {
  constexpr std::uint32_t kBytes = 128 << 10;
  constexpr std::uint64_t kSignal = std::uint64_t{3} << 20;
  Ends ends(GetParam());
  for (std::uint64_t round = 1; round <= 8; ++round) {
    fill_pattern(ends.first.memory().first(kBytes), round);
    WireOperation data = ends.write(2 * round, 0, 0, kBytes);
    data.signalled = false;
    WireOperation signal = ends.fetch_add(2 * round + 1, kSignal, 1);
    signal.local_address = kSignal;
    ASSERT_EQ(ends.first.wire().post(std::array{data, signal}), 2U);
    // The receiver watches its memory; no completion has been looked at yet.
    const Deadline deadline(deep_ep::test::long_patience());
    while (ends.second.word(kSignal) != round) ASSERT_FALSE(deadline.expired());
    ASSERT_EQ(std::memcmp(ends.second.memory().data(), ends.first.memory().data(), kBytes), 0) << round;
    EXPECT_EQ(run(ends.first.wire(), {}, 1)[0].id, 2 * round + 1);
  }
}

TEST_P(RxeTransport, UnsignalledOperationsFreeTheirRoomAndCompletionsKeepTheirOrder) {
  constexpr std::uint64_t kOperations = 600;
  Ends ends(GetParam(), {.bytes = 65536, .depth = 16});
  std::vector<WireOperation> operations;
  std::vector<std::uint64_t> expected;
  for (std::uint64_t i = 0; i < kOperations; ++i) {
    WireOperation operation = ends.write_inline(i, std::as_bytes(std::span(&i, 1)), 8 * i);
    operation.signalled = i % 7 == 0 || i + 1 == kOperations;
    if (operation.signalled) expected.push_back(i);
    operations.push_back(operation);
  }
  std::vector<std::uint64_t> completed;
  for (const WireCompletion& completion : run(ends.first.wire(), operations, expected.size())) {
    ASSERT_EQ(completion.syndrome, Syndrome::none);
    completed.push_back(completion.id);
  }
  EXPECT_EQ(completed, expected);
  for (std::uint64_t i = 0; i < kOperations; ++i) ASSERT_EQ(ends.second.word(8 * i), i);
}

TEST_P(RxeTransport, BothDirectionsAtOnce) {
  Ends ends(GetParam());
  constexpr std::uint32_t kBytes = 256 << 10;
  fill_pattern(ends.first.memory().first(kBytes), 5);
  fill_pattern(ends.second.memory().first(kBytes), 6);
  const WireOperation there = ends.write(1, 0, kBytes, kBytes);
  WireOperation back = there;
  back.queue_pair = ends.second.pair(0).number();
  back.local_key = ends.second.local_key();
  back.remote_key = ends.first.remote_key();
  ASSERT_EQ(ends.first.wire().post(std::array{there}), 1U);
  ASSERT_EQ(ends.second.wire().post(std::array{back}), 1U);
  EXPECT_EQ(run(ends.first.wire(), {}, 1)[0].syndrome, Syndrome::none);
  EXPECT_EQ(run(ends.second.wire(), {}, 1)[0].syndrome, Syndrome::none);
  EXPECT_EQ(std::memcmp(ends.second.memory().data() + kBytes, ends.first.memory().data(), kBytes), 0);
  EXPECT_EQ(std::memcmp(ends.first.memory().data() + kBytes, ends.second.memory().data(), kBytes), 0);
}

}  // namespace
}  // namespace deep_ep::rdma::verbs::test
