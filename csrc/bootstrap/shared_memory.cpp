// Ranks that are threads of one process, or processes of one host that share a file, meet in a segment of memory.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/backoff.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

/// Bytes that a rank shows at once; longer messages take several rounds.
constexpr std::size_t kChunk = std::size_t{16} * 1024;

// Words that several processes touch must be lock-free, or they would not work across address spaces.
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

struct alignas(64) Seat {
  std::atomic<std::uint64_t> round;  ///< rounds this rank has entered
  std::byte chunks[2][kChunk];       ///< of odd and even rounds: a slow reader of round n is not disturbed by n+1
};

/// A seat for each rank. Fresh memory is all zeros, which is the initial value of every field.
using Segment = std::shared_ptr<Seat[]>;

/// `fd` -1: memory of this process, and of those that it forks.
Segment map_segment(int fd, int size) {
  const std::size_t bytes = static_cast<std::size_t>(size) * sizeof(Seat);
  if (fd >= 0 && ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    fail<SystemError>("ftruncate to {}: {}", format_bytes(bytes), errno_text(errno));
  }
  const int flags = MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0);
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (memory == MAP_FAILED) {
    fail<SystemError>("bootstrap: mapping {} of shared memory: {}", format_bytes(bytes), errno_text(errno));
  }
  return {static_cast<Seat*>(memory), [bytes](Seat* seats) { ::munmap(seats, bytes); }};
}

/// The all-gather of one rank.
class Rounds {
 public:
  Rounds(int rank, int size, double timeout_s, Segment seats)
      : rank_(rank), size_(size), timeout_s_(timeout_s), seats_(std::move(seats)) {}

  void operator()(std::span<const std::byte> mine, std::span<std::byte> all) {
    for (std::size_t done = 0; done < mine.size(); done += kChunk) {
      const std::span<const std::byte> part = mine.subspan(done, std::min(mine.size() - done, kChunk));
      std::ranges::copy(part, seat(rank_).chunks[(round_ + 1) % 2]);
      enter_round();
      for (int peer = 0; peer < size_; ++peer) {
        std::copy_n(seat(peer).chunks[round_ % 2], part.size(),
                    all.data() + static_cast<std::size_t>(peer) * mine.size() + done);
      }
    }
  }

 private:
  Seat& seat(int rank) const { return seats_[rank]; }

  std::vector<int> late() const {
    std::vector<int> ranks;
    for (int peer = 0; peer < size_; ++peer) {
      if (seat(peer).round.load(std::memory_order_acquire) < round_) ranks.push_back(peer);
    }
    return ranks;
  }

  void enter_round() {
    if (over_) {
      fail<TimeoutError>("bootstrap over shared memory: rank {} of {} failed or gave up waiting before; make a new one",
                         rank_, size_);
    }
    seat(rank_).round.store(++round_, std::memory_order_release);
    over_ = true;  // unless all come
    std::vector<int> missing;
    const Backoff wait;
    for (const Deadline deadline(timeout_s_); !(missing = late()).empty(); std::this_thread::sleep_for(wait.nap())) {
      WaitEnd::look_now();
      if (!deadline.expired()) continue;
      fail<TimeoutError>("bootstrap: rank {} waited {} s for {} to enter an all_gather", rank_, timeout_s_,
                         format_ranks(missing));
    }
    over_ = false;
  }

  int rank_;
  int size_;
  double timeout_s_;
  std::uint64_t round_ = 0;
  bool over_ = false;  ///< the ranks may no longer agree on the round
  Segment seats_;
};

}  // namespace

std::shared_ptr<Bootstrap> make_file_bootstrap(int fd, int rank, int size, double timeout_s) {
  require_rank(rank, size);
  return make_callback_bootstrap(rank, size, Rounds(rank, size, timeout_s, map_segment(fd, size)));
}

std::vector<std::shared_ptr<Bootstrap>> make_thread_bootstraps(int size, std::optional<double> timeout_s) {
  require_rank(0, size);
  const double seconds = timeout_in_effect(timeout_s);
  const Segment seats = map_segment(-1, size);
  std::vector<std::shared_ptr<Bootstrap>> bootstraps;
  for (int rank = 0; rank < size; ++rank) {
    bootstraps.push_back(make_callback_bootstrap(rank, size, Rounds(rank, size, seconds, seats)));
  }
  return bootstraps;
}

}  // namespace deep_ep
