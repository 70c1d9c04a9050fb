// Ranks that are threads of one process meet at a table protected by a mutex.
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

class Table {
 public:
  Table(int size, double timeout_s)
      : timeout_s_(timeout_s), present_(static_cast<std::size_t>(size)), messages_(static_cast<std::size_t>(size)) {}

  std::vector<std::byte> exchange(int rank, std::span<const std::byte> mine) {
    const Deadline deadline(timeout_s_);
    std::unique_lock lock(mutex_);
    require_intact();
    const std::uint64_t round = round_;
    present_[static_cast<std::size_t>(rank)] = true;
    messages_[static_cast<std::size_t>(rank)].assign(mine.begin(), mine.end());
    if (++arrived_ == messages_.size()) {
      finish_round();
    } else {
      await_round(lock, round, rank, deadline);
    }
    // The next round cannot end before this rank enters it, so the outcome is still that of `round`.
    const std::shared_ptr<const Outcome> outcome = outcome_;
    lock.unlock();
    require_equal_sizes(outcome->sizes);
    return outcome->bytes;
  }

  int size() const { return static_cast<int>(messages_.size()); }

 private:
  struct Outcome {
    std::vector<std::uint64_t> sizes;
    std::vector<std::byte> bytes;
  };

  void finish_round() {
    auto outcome = std::make_shared<Outcome>();
    for (const auto& message : messages_) {
      outcome->sizes.push_back(message.size());
      outcome->bytes.insert(outcome->bytes.end(), message.begin(), message.end());
    }
    outcome_ = std::move(outcome);
    arrived_ = 0;
    present_.assign(present_.size(), false);
    ++round_;
    changed_.notify_all();
  }

  void await_round(std::unique_lock<std::mutex>& lock, std::uint64_t round, int rank, const Deadline& deadline) {
    while (round_ == round && broken_.empty()) {
      if (deadline.expired()) {
        std::vector<int> missing;
        for (int peer = 0; peer < size(); ++peer) {
          if (!present_[static_cast<std::size_t>(peer)]) missing.push_back(peer);
        }
        broken_ = fmt::format("bootstrap of {} threads: rank {} waited {} s for {}", size(), rank, deadline.seconds(),
                              format_ranks(missing));
        changed_.notify_all();
        break;
      }
      changed_.wait_for(lock, deadline.remaining(std::chrono::seconds(1)));
    }
    if (round_ == round) require_intact();
  }

  // Once a rank has given up, the ranks no longer agree on the round. Everybody is told at once, the late rank too,
  // rather than each after a deadline of its own.
  void require_intact() const {
    if (!broken_.empty()) throw TimeoutError(broken_);
  }

  const double timeout_s_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t round_ = 0;
  std::size_t arrived_ = 0;
  std::vector<bool> present_;
  std::vector<std::vector<std::byte>> messages_;
  std::shared_ptr<const Outcome> outcome_;
  std::string broken_;
};

class ThreadBootstrap final : public Bootstrap {
 public:
  ThreadBootstrap(std::shared_ptr<Table> table, int rank) : table_(std::move(table)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return table_->size(); }
  std::vector<std::byte> all_gather(std::span<const std::byte> mine) override { return table_->exchange(rank_, mine); }

 private:
  std::shared_ptr<Table> table_;
  int rank_;
};

}  // namespace

std::vector<std::shared_ptr<Bootstrap>> make_thread_bootstraps(int size, std::optional<double> timeout_s) {
  require_rank(0, size);
  auto table = std::make_shared<Table>(size, timeout_in_effect(timeout_s));
  std::vector<std::shared_ptr<Bootstrap>> bootstraps;
  bootstraps.reserve(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) bootstraps.push_back(std::make_shared<ThreadBootstrap>(table, rank));
  return bootstraps;
}

}  // namespace deep_ep
