// Ends the waits of an all-gather for a rank that will not come: those of the library's own transports ask now and
// then.
#pragma once

#include <functional>

#include "deep_ep/error.hpp"

namespace deep_ep {

/// Another rank has left the buffer (it was broken there, or dropped), or its process has ended. It takes part in no
/// exchange of the buffer any more.
class PeerLeft : public SystemError {
 public:
  using SystemError::SystemError;
};

/// Waits of this thread ask `look` as long as this object exists.
class WaitEnd {
 public:
  /// `look` throws where nobody needs to wait any longer. May be empty.
  explicit WaitEnd(const std::function<void()>& look) : outer_(current_) {
    if (!look) return;
    look();
    current_ = &look;
  }
  ~WaitEnd() { current_ = outer_; }
  WaitEnd(const WaitEnd&) = delete;
  WaitEnd& operator=(const WaitEnd&) = delete;

  static void look_now() {
    if (current_ != nullptr) (*current_)();
  }

 private:
  inline static thread_local const std::function<void()>* current_ = nullptr;
  const std::function<void()>* outer_;
};

}  // namespace deep_ep
