// Whether we are still in the process that made an object, or in a child forked since.
#pragma once

namespace deep_ep {

/// Part of objects with threads or peers. Threads do not follow into a forked child, and what is shared with peers
/// stays the parent's: there, the object must neither wait nor write.
class HomeProcess {
 public:
  HomeProcess();

  /// Cheap enough for every call: no system call.
  bool left() const;

 private:
  unsigned forks_;
};

}  // namespace deep_ep
