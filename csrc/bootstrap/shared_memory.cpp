// Ranks that are processes of one host meet in a segment of POSIX shared memory, those that are threads of one process
// in a segment without a name.
//
// Life of a segment with a name: rank 0 creates it, everybody joins, rank 0 removes the name, then all return. So a
// name exists only while ranks are joining, and a name whose lock nobody holds was left by a program that died.
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

constexpr std::size_t kChunk =
    std::size_t{16} * 1024;  // bytes a rank shows at once; longer messages take several rounds
constexpr std::uint32_t kReady = 0x44454550;
constexpr auto kNap = std::chrono::milliseconds(2);

// Words that several processes touch must be lock-free, or they would not work across address spaces.
static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free);

struct Page {
  std::uint64_t message_bytes;
  std::byte chunk[kChunk];
};

struct alignas(64) Seat {
  std::atomic<std::uint32_t> taken;
  std::atomic<std::uint64_t> round;  ///< rounds this rank has entered
  Page pages[2];                     ///< of odd and even rounds: a slow reader of round n is not disturbed by n+1
};

struct alignas(64) Header {
  std::atomic<std::uint32_t> ready;    ///< kReady once the header is filled in
  std::atomic<std::uint32_t> open;     ///< 1 once all ranks joined and the name is gone
  std::atomic<std::uint32_t> changes;  ///< futex: bumped after each change that somebody may wait for
  std::atomic<std::uint32_t> broken;   ///< 0, or 1 + the rank that gave up waiting
  std::uint32_t size;
};

class Segment {
 public:
  /// `fd` -1: memory of this process.
  Segment(int fd, int size) : bytes_(bytes_for(size)) {
    const int flags = MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0);
    void* memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (memory == MAP_FAILED) {
      fail<SystemError>("bootstrap: mapping {} of shared memory: {}", format_bytes(bytes_), errno_text(errno));
    }
    memory_ = static_cast<std::byte*>(memory);
  }
  ~Segment() { ::munmap(memory_, bytes_); }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // A fresh segment is all zeros, which is the initial value of every field.
  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  Seat& seat(int rank) const {
    return *reinterpret_cast<Seat*>(memory_ + sizeof(Header) + static_cast<std::size_t>(rank) * sizeof(Seat));
  }
  static std::size_t bytes_for(int size) { return sizeof(Header) + static_cast<std::size_t>(size) * sizeof(Seat); }

  void announce() const {
    header().changes.fetch_add(1, std::memory_order_release);
    ::syscall(SYS_futex, &header().changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  /// Sleeps until `done()`; false when the deadline passed first.
  template <class Done>
  bool await(const Deadline& deadline, Done done) const {
    for (;;) {
      const std::uint32_t seen = header().changes.load(std::memory_order_acquire);
      if (done()) return true;
      if (deadline.expired()) return false;
      WaitEnd::look_now();
      // Bounded naps: a rank that is killed between its change and its wake-up must not leave us asleep for long.
      const auto nap =
          std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.remaining(std::chrono::milliseconds(200)));
      const timespec wait{.tv_sec = 0, .tv_nsec = static_cast<long>(std::max<std::int64_t>(nap.count(), 1000))};
      ::syscall(SYS_futex, &header().changes, FUTEX_WAIT, seen, &wait, nullptr, 0);
    }
  }

 private:
  std::size_t bytes_;
  std::byte* memory_ = nullptr;
};

class SharedMemoryBootstrap final : public Bootstrap {
 public:
  SharedMemoryBootstrap(const std::string& name, int rank, int size, double timeout_s)
      : name_(name),
        // The owner is part of the name: two users may run the same program on one host.
        path_(fmt::format("/deep_ep.{}.{}", ::geteuid(), name)),
        rank_(rank),
        size_(size),
        timeout_s_(timeout_s) {
    const Deadline deadline(timeout_s_);
    if (rank_ == 0) {
      create(deadline);
    } else {
      join(deadline);
    }
  }

  /// In a segment where all ranks are.
  SharedMemoryBootstrap(std::string name, int rank, int size, double timeout_s, std::shared_ptr<Segment> segment)
      : name_(std::move(name)), rank_(rank), size_(size), timeout_s_(timeout_s), segment_(std::move(segment)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::vector<std::byte> all_gather(std::span<const std::byte> mine) override {
    std::vector<std::byte> all(mine.size() * static_cast<std::size_t>(size_));
    std::size_t done = 0;
    do {
      const std::size_t count = std::min(mine.size() - done, kChunk);
      Page& page = segment_->seat(rank_).pages[(round_ + 1) % 2];
      page.message_bytes = mine.size();
      std::copy_n(mine.begin() + static_cast<std::ptrdiff_t>(done), count, page.chunk);
      enter_round();
      if (done == 0) require_equal_messages();
      for (int peer = 0; peer < size_; ++peer) {
        const Page& theirs = segment_->seat(peer).pages[round_ % 2];
        std::copy_n(theirs.chunk, count, all.data() + static_cast<std::size_t>(peer) * mine.size() + done);
      }
      done += count;
    } while (done < mine.size());
    return all;
  }

 private:
  void create(const Deadline& deadline) {
    UniqueFd fd = create_file(deadline);
    // From here until everybody is in, the name must go whatever happens.
    struct Remover {
      const std::string& path;
      ~Remover() { ::shm_unlink(path.c_str()); }
    };
    {
      const Remover remover{path_};
      // Allocated now: a full /dev/shm is an error here and not a SIGBUS later.
      int error = EINTR;
      while (error == EINTR) error = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(Segment::bytes_for(size_)));
      if (error != 0) {
        fail<SystemError>("bootstrap '{}': reserving {} of shared memory for {}: {}", name_,
                          format_bytes(Segment::bytes_for(size_)), path_, errno_text(error));
      }
      segment_ = std::make_shared<Segment>(fd.get(), size_);
      segment_->header().size = static_cast<std::uint32_t>(size_);
      take_seat();
      segment_->header().ready.store(kReady, std::memory_order_release);
      segment_->announce();
      const bool decided = segment_->await(deadline, [&] { return absent().empty() || broken_by() >= 0; });
      if (!decided) give_up("to join", absent());
      require_intact();
    }
    segment_->header().open.store(1, std::memory_order_release);
    segment_->announce();
  }

  UniqueFd create_file(const Deadline& deadline) {
    for (;;) {
      UniqueFd fd(::shm_open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
      if (fd) {
        // Held for as long as this process joins; the kernel drops it when the process dies.
        if (::flock(fd.get(), LOCK_EX) != 0) {
          const int error = errno;
          ::shm_unlink(path_.c_str());
          fail<SystemError>("bootstrap '{}': locking {}: {}", name_, path_, errno_text(error));
        }
        return fd;
      }
      if (errno != EEXIST) fail<SystemError>("bootstrap '{}': creating {}: {}", name_, path_, errno_text(errno));
      const UniqueFd old = open_file();
      if (old && abandoned(old.get())) {
        if (::shm_unlink(path_.c_str()) != 0 && errno != ENOENT) {
          fail<SystemError>("bootstrap '{}': removing what a program that died left at {}: {}", name_, path_,
                            errno_text(errno));
        }
      } else if (deadline.expired()) {
        fail<TimeoutError>("bootstrap '{}': another group of this name has been joining for {} s", name_,
                           deadline.seconds());
      } else {
        std::this_thread::sleep_for(kNap);
      }
    }
  }

  void join(const Deadline& deadline) {
    while (!try_join()) {
      if (deadline.expired()) {
        fail<TimeoutError>("bootstrap '{}': rank {} waited {} s for rank 0 to create {}", name_, rank_,
                           deadline.seconds(), path_);
      }
      std::this_thread::sleep_for(kNap);
    }
    const bool decided = segment_->await(
        deadline, [&] { return segment_->header().open.load(std::memory_order_acquire) != 0 || broken_by() >= 0; });
    if (!decided) give_up("to join", absent().empty() ? std::vector{0} : absent());
    require_intact();
  }

  /// What has the name, if anything does. Any user may create it, and we might wait for ever for another user's to go.
  UniqueFd open_file() const {
    UniqueFd fd(::shm_open(path_.c_str(), O_RDWR | O_CLOEXEC, 0));
    if (!fd) {
      if (errno == ENOENT) return fd;
      fail<SystemError>("bootstrap '{}': opening {}: {}", name_, path_, errno_text(errno));
    }
    const uid_t owner = status_of(fd.get()).st_uid;
    if (owner != ::geteuid()) {
      fail<SystemError>("bootstrap '{}': {} belongs to user {}, not to {}", name_, path_, owner, ::geteuid());
    }
    return fd;
  }

  struct stat status_of(int fd) const {
    struct stat status {};
    if (::fstat(fd, &status) != 0) fail<SystemError>("bootstrap '{}': {}", name_, errno_text(errno));
    return status;
  }

  bool try_join() {
    const UniqueFd fd = open_file();
    if (!fd) return false;
    if (static_cast<std::size_t>(status_of(fd.get()).st_size) < sizeof(Header) || abandoned(fd.get())) return false;
    const Segment segment(fd.get(), 0);
    if (segment.header().ready.load(std::memory_order_acquire) != kReady) return false;
    // A group that failed while joining is about to disappear; the next one will have this name.
    if (segment.header().broken.load(std::memory_order_acquire) != 0) return false;
    const auto their_size = static_cast<int>(segment.header().size);
    if (their_size != size_) {
      fail<RankMismatch>("bootstrap '{}': rank {} was told of {} ranks, rank 0 of {}", name_, rank_, size_, their_size);
    }
    segment_ = std::make_shared<Segment>(fd.get(), size_);
    take_seat();
    segment_->announce();
    return true;
  }

  // If the lock can be taken, the process that created the segment is gone.
  static bool abandoned(int fd) {
    if (::flock(fd, LOCK_SH | LOCK_NB) != 0) return false;
    ::flock(fd, LOCK_UN);
    return true;
  }

  void take_seat() {
    if (segment_->seat(rank_).taken.exchange(1, std::memory_order_acq_rel) != 0) {
      fail<InvalidArgument>("bootstrap '{}': rank {} joined twice", name_, rank_);
    }
  }

  std::vector<int> absent() const {
    std::vector<int> ranks;
    for (int peer = 0; peer < size_; ++peer) {
      if (segment_->seat(peer).taken.load(std::memory_order_acquire) == 0) ranks.push_back(peer);
    }
    return ranks;
  }

  /// In one order for all, so that of two that come at the same time one sees that all are there.
  std::vector<int> late() const {
    std::vector<int> ranks;
    for (int peer = 0; peer < size_; ++peer) {
      if (segment_->seat(peer).round.load() < round_) ranks.push_back(peer);
    }
    return ranks;
  }

  void enter_round() {
    require_intact();
    ++round_;
    segment_->seat(rank_).round.store(round_);
    if (late().empty()) segment_->announce();  // the last to come wakes the others, once
    const Deadline deadline(timeout_s_);
    // A rank that ends this round may give up in the next one while we still wake up: look at completeness first.
    const bool decided = segment_->await(deadline, [&] { return late().empty() || broken_by() >= 0; });
    const std::vector<int> missing = late();
    if (missing.empty()) return;
    if (decided) require_intact(missing);
    give_up("to enter an all_gather", missing);
  }

  void require_equal_messages() const {
    std::vector<std::uint64_t> sizes;
    sizes.reserve(static_cast<std::size_t>(size_));
    for (int peer = 0; peer < size_; ++peer) sizes.push_back(segment_->seat(peer).pages[round_ % 2].message_bytes);
    require_equal_sizes(sizes);
  }

  int broken_by() const { return static_cast<int>(segment_->header().broken.load(std::memory_order_acquire)) - 1; }

  // Once a rank has given up, the ranks no longer agree on the round: everybody is told at once, the late rank too.
  void require_intact(const std::vector<int>& missing = {}) const {
    if (broken_by() < 0) return;
    const std::string waits = missing.empty()
                                  ? std::string()
                                  : fmt::format(", which waits for {} to enter an all_gather", format_ranks(missing));
    fail<TimeoutError>(
        "bootstrap '{}': rank {} gave up waiting for others; the group of {} ranks is over (seen by rank {}{})", name_,
        broken_by(), size_, rank_, waits);
  }

  [[noreturn]] void give_up(const char* what, const std::vector<int>& missing) {
    std::uint32_t nobody = 0;
    segment_->header().broken.compare_exchange_strong(nobody, static_cast<std::uint32_t>(rank_) + 1,
                                                      std::memory_order_acq_rel);
    segment_->announce();
    fail<TimeoutError>("bootstrap '{}': rank {} waited {} s for {} {}", name_, rank_, timeout_s_, format_ranks(missing),
                       what);
  }

  std::string name_;
  std::string path_;
  int rank_;
  int size_;
  double timeout_s_;
  std::uint64_t round_ = 0;
  std::shared_ptr<Segment> segment_;
};

}  // namespace

std::shared_ptr<Bootstrap> make_shared_memory_bootstrap(const std::string& name, int rank, int size,
                                                        std::optional<double> timeout_s) {
  require_rank(rank, size);
  const bool fits = std::all_of(name.begin(), name.end(), [](unsigned char letter) {
    return letter < 128 && (std::isalnum(letter) != 0 || letter == '-' || letter == '_');
  });
  if (name.empty() || name.size() > 200 || !fits) {
    fail<InvalidArgument>("bootstrap name '{}', allowed: 1 to 200 letters, digits, '-' and '_'", name);
  }
  return std::make_shared<SharedMemoryBootstrap>(name, rank, size, timeout_in_effect(timeout_s));
}

std::vector<std::shared_ptr<Bootstrap>> make_thread_bootstraps(int size, std::optional<double> timeout_s) {
  require_rank(0, size);
  const double seconds = timeout_in_effect(timeout_s);
  const auto segment = std::make_shared<Segment>(-1, size);
  std::vector<std::shared_ptr<Bootstrap>> bootstraps;
  for (int rank = 0; rank < size; ++rank) {
    bootstraps.push_back(
        std::make_shared<SharedMemoryBootstrap>(fmt::format("{} threads", size), rank, size, seconds, segment));
  }
  return bootstraps;
}

}  // namespace deep_ep
