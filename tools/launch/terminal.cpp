#include "tools/launch/terminal.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <thread>
#include <utility>

#include "csrc/support/format.hpp"

namespace deep_ep::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMostKept = 4U << 20;  ///< of what nobody reads
constexpr std::size_t kManyKept = 1U << 20;
constexpr auto kStandstill = std::chrono::seconds(2);  ///< who reads nothing so long, reads nothing any more
constexpr std::size_t kPiece = 4096;

}  // namespace

/// Shared with the thread, which may hang in write() when nobody needs it any more.
struct Terminal::State {
  State(int to, std::string called) : fd(to), name(std::move(called)) {}

  int fd;
  std::string name;
  std::mutex mutex;
  std::condition_variable changed;
  std::string kept;
  std::size_t written = 0;  ///< of all time, so that progress can be seen
  Clock::time_point moved = Clock::now();
  std::size_t dropped = 0;
  int error = 0;
  bool is_writing = false;
  bool over = false;

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return over || !kept.empty(); });
      if (over) return;
      const std::string piece = kept.substr(0, kPiece);
      kept.erase(0, piece.size());
      is_writing = true;
      lock.unlock();
      const int failure = write_all(piece);
      lock.lock();
      is_writing = false;
      written += piece.size();
      moved = Clock::now();
      if (failure != 0) {
        error = failure;
        dropped += piece.size() + std::exchange(kept, {}).size();
      }
      changed.notify_all();
    }
  }

  int write_all(std::string_view text) const {
    while (!text.empty()) {
      const ssize_t count = ::write(fd, text.data(), text.size());
      if (count > 0) {
        text.remove_prefix(static_cast<std::size_t>(count));
      } else if (errno == EAGAIN) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // another program has made it so
      } else if (errno != EINTR) {
        return errno;
      }
    }
    return 0;
  }
};

Terminal::Terminal(int fd, std::string name) : state_(std::make_shared<State>(fd, std::move(name))) {
  // Signals are the main thread's.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([state = state_] { state->run(); }).detach();
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Terminal::~Terminal() {
  const std::lock_guard lock(state_->mutex);
  state_->over = true;
  state_->changed.notify_all();
}

void Terminal::write(std::string_view text) {
  const std::lock_guard lock(state_->mutex);
  if (state_->kept.empty() && !state_->is_writing) state_->moved = Clock::now();
  // One round of the loop brings more than this where many ranks print; what is being read waits all the same.
  const bool is_too_much = state_->kept.size() + text.size() > kMostKept && Clock::now() - state_->moved >= kStandstill;
  if (state_->error != 0 || is_too_much) {
    state_->dropped += text.size();
    return;
  }
  state_->kept += text;
  state_->changed.notify_all();
}

bool Terminal::is_behind() const {
  const std::lock_guard lock(state_->mutex);
  return state_->kept.size() > kManyKept && Clock::now() - state_->moved < kStandstill;
}

std::string Terminal::finish(double seconds) {
  std::unique_lock lock(state_->mutex);
  State& state = *state_;
  const auto is_done = [&] { return state.kept.empty() && !state.is_writing; };
  bool moves = true;
  while (!is_done() && moves) {
    const std::size_t before = state.written;
    state.changed.wait_for(lock, std::chrono::duration<double>(seconds),
                           [&] { return is_done() || state.written != before; });
    moves = state.written != before;
  }
  const std::size_t lost = state.dropped + state.kept.size() + (state.is_writing ? 1 : 0);
  if (lost == 0) return {};
  return fmt::format("{} of {} were not written: {}", format_bytes(lost), state.name,
                     state.error != 0 ? errno_text(state.error) : "nobody reads it");
}

}  // namespace deep_ep::tools
