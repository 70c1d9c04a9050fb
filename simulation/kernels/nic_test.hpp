// What the kernel of `deep_ep doctor --nic-test` needs: queue pairs to itself or to another machine, memory that looks
// the same on both sides, and what is to be done.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/faults.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep {

/// A write alone comes first: of several that fail, the last one's completion is seen, which says only that it was
/// flushed. Then a batch that a sender posts again and again: entries, in turn a write and an addition, each to a place
/// or counter of its own.
struct NicTestTask {
  /// The receiver looks at each batch; else it looks at the end, and all goes as fast as it can.
  bool answered = false;
  int entries = 0;   ///< of each kind in a batch; 0: there is none, and nobody receives
  int places = 0;    ///< where writes go in turn; 0: there are none
  int words = 0;     ///< of each write
  int counters = 0;  ///< where additions go in turn; 0: there are none
};

/// What one warp has done and seen.
struct NicTestResult {
  std::uint64_t operations = 0;   ///< posted and complete
  std::uint64_t bytes = 0;        ///< that they carried
  std::uint64_t nanoseconds = 0;  ///< from the first posted to the last complete
  std::uint64_t wrong = 0;        ///< words that were not what was sent; the rest is about the first of them
  std::uint64_t round = 0;
  std::uint64_t place = 0;  ///< the write, or nic_test::kSlots + the counter
  std::uint64_t expected = 0;
  std::uint64_t found = 0;
};

/// Memory of one pair of queue pairs, in bytes from its beginning; the heap has one after the other.
namespace nic_test {
inline constexpr int kMostPairs = 8;
inline constexpr int kSlots = 512;  ///< in a round each gets a write, and an addition to its counter
inline constexpr int kSlotWords = 16;
inline constexpr int kLitmusWords = 4096;
inline constexpr std::uint32_t kMessageBytes = 32768;
inline constexpr int kMessages = 16;

inline constexpr std::uint64_t kSignal = 0;   ///< rounds that the sender has sent; kStop: no more come
inline constexpr std::uint64_t kAnswer = 8;   ///< rounds that the receiver has seen
inline constexpr std::uint64_t kReport = 16;  ///< operations that the sender has made
inline constexpr std::uint64_t kCounters = 64;
inline constexpr std::uint64_t kSink = 79 << 10;  ///< of the first pair: see RdmaQueuePair::sink
inline constexpr std::uint64_t kIncoming = 80 << 10;
inline constexpr std::uint64_t kOutgoing = kIncoming + std::uint64_t{kMessages} * kMessageBytes;
inline constexpr std::uint64_t kPairBytes = kOutgoing + std::uint64_t{kMessages} * kMessageBytes;
static_assert(kCounters + 8 * kSlots <= kSink && 4 * kSlots * kSlotWords <= kOutgoing - kIncoming);

/// Rounds of writes and fetch-adds in turn; the receiver looks at each round's data.
inline constexpr NicTestTask kEntries{true, kSlots, kSlots, kSlotWords, kSlots};
/// Rounds of data and, posted right behind it, a flag; the receiver looks as soon as it sees the flag.
inline constexpr NicTestTask kLitmus{true, 32, 32, kLitmusWords / 32};
inline constexpr NicTestTask kWrites{false, 32, kMessages, kMessageBytes / 4};  ///< long ones, as fast as they go
inline constexpr NicTestTask kAdditions{.entries = 32, .counters = 1};          ///< as fast as they go
inline constexpr std::uint64_t kStop = std::uint64_t{1} << 32;

/// A word that is sent: differs with round and place.
DEEP_EP_HOST_DEVICE constexpr std::uint32_t word_of(std::uint64_t round, int place) {
  return (static_cast<std::uint32_t>(round) * 0x9e3779b9u) ^ (static_cast<std::uint32_t>(place) * 0x85ebca6bu) ^
         0x5bd1u;
}
}  // namespace nic_test

/// One block; warps 2i and 2i + 1 send and receive over queue pairs 2i and 2i + 1.
struct NicTestParams {
  NicTestTask task;
  RdmaQueuePair queues[2 * nic_test::kMostPairs];
  std::byte* heap = nullptr;         ///< this side's, of zeros
  std::uint64_t operations = 0;      ///< enough of them
  std::uint64_t budget_ns = 0;       ///< enough time
  NicTestResult* results = nullptr;  ///< [warps], of zeros
  /// Receivers wait longer: what keeps a sender waiting is the cause of what they miss, so it is put on record first. A
  /// signal or answer that did not come is there with the warp as its peer.
  WaitContext senders_wait, receivers_wait;
};

}  // namespace deep_ep
