#include "csrc/support/home_process.hpp"

#include <pthread.h>

#include <atomic>

namespace deep_ep {
namespace {

/// Forks between the first process of the program and this one.
std::atomic<unsigned> forks{0};

}  // namespace

HomeProcess::HomeProcess() {
  static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);  // fails only where memory has run out
  forks_ = forks.load(std::memory_order_relaxed);
}

bool HomeProcess::left() const { return forks.load(std::memory_order_relaxed) != forks_; }

}  // namespace deep_ep
