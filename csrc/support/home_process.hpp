// Whether we are still in the process that made an object, or in a child forked since.
#pragma once

#include <pthread.h>

#include <atomic>

namespace deep_ep {

/// Part of objects with threads or peers. Threads do not follow into a forked child, and what is shared with peers
/// stays the parent's: there, the object must neither wait nor write.
class HomeProcess {
 public:
  /// Cheap enough for every call: no system call.
  bool left() const { return forks_ != at_home_; }

 private:
  /// Between the first process of the program and this one.
  inline static std::atomic<unsigned> forks_ = 0;
  // It fails only where memory has run out.
  inline static const int registered_ = ::pthread_atfork(nullptr, nullptr, [] { ++forks_; });

  unsigned at_home_ = forks_;
};

}  // namespace deep_ep
