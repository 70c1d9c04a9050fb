// Code of the program that runs in the middle of a call: handlers of signals, a framework's allocator, an all-gather.
#pragma once

namespace deep_ep {

/// While it lives, this thread runs such code. A call from there, of the buffer whose call it is in, is refused: the
/// outer call has not enqueued all of its work.
class ProgramCode {
 public:
  ProgramCode() { ++depth_; }
  ~ProgramCode() { --depth_; }
  ProgramCode(const ProgramCode&) = delete;
  ProgramCode& operator=(const ProgramCode&) = delete;

  /// How many live in this thread.
  static int depth() { return depth_; }

 private:
  inline static thread_local int depth_ = 0;
};

}  // namespace deep_ep
