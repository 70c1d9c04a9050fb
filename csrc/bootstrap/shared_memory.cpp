// Ranks that are threads of one process, or processes of one host that share a file, meet in a segment of memory.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "csrc/bootstrap/polled.hpp"

namespace deep_ep {
namespace {

/// Bytes that a rank shows at once; a longer message takes several rounds.
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

class SeatTransport {
 public:
  static constexpr const char* name = "shared memory";
  static constexpr bool kIsWrittenTo = false;
  const int rank, size;

  SeatTransport(int of_rank, int of_size, Segment seats) : rank(of_rank), size(of_size), seats_(std::move(seats)) {}

  void gather(std::span<const std::byte> mine, std::span<std::byte> all, const RankWait& wait) {
    for (std::size_t done = 0; done < mine.size(); done += kChunk) {
      const std::span<const std::byte> part = mine.subspan(done, std::min(mine.size() - done, kChunk));
      std::ranges::copy(part, seats_[rank].chunks[++round_ % 2]);
      seats_[rank].round.store(round_, std::memory_order_release);
      wait.until([&] { return late(); });
      for (int peer = 0; peer < size; ++peer) {
        std::copy_n(seats_[peer].chunks[round_ % 2], part.size(),
                    all.data() + static_cast<std::size_t>(peer) * mine.size() + done);
      }
    }
  }

 private:
  std::string late() const {
    std::vector<int> ranks;
    for (int peer = 0; peer < size; ++peer) {
      if (seats_[peer].round.load(std::memory_order_acquire) < round_) ranks.push_back(peer);
    }
    return ranks.empty() ? "" : format_ranks(ranks);
  }

  Segment seats_;
  std::uint64_t round_ = 0;
};

}  // namespace

std::shared_ptr<Bootstrap> make_file_bootstrap(int fd, int rank, int size, double timeout_s) {
  require_rank(rank, size);
  return make_polled_bootstrap(std::make_unique<SeatTransport>(rank, size, map_segment(fd, size)), timeout_s);
}

std::vector<std::shared_ptr<Bootstrap>> make_thread_bootstraps(int size, std::optional<double> timeout_s) {
  require_rank(0, size);
  const double seconds = timeout_in_effect(timeout_s);
  const Segment seats = map_segment(-1, size);
  std::vector<std::shared_ptr<Bootstrap>> bootstraps;
  for (int rank = 0; rank < size; ++rank) {
    bootstraps.push_back(make_polled_bootstrap(std::make_unique<SeatTransport>(rank, size, seats), seconds));
  }
  return bootstraps;
}

}  // namespace deep_ep
