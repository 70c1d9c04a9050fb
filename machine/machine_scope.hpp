// The way from a kernel thread into the machine and back.
#pragma once

#include "machine/sanitizers.hpp"

namespace deep_ep::host_machine {

/// Leaves a kernel thread that must end because its kernel failed elsewhere. Not a std::exception: no kernel catches
/// it.
struct Aborted {};

/// First statement of every machine function: from here on ThreadSanitizer looks away, until the thread goes on.
class MachineScope {
 public:
  DEEP_EP_NO_TSAN MachineScope(void* thread, void* worker) : thread_(thread) { tsan::switch_context(worker); }
  DEEP_EP_NO_TSAN ~MachineScope() { tsan::switch_context(thread_); }
  MachineScope(const MachineScope&) = delete;
  MachineScope& operator=(const MachineScope&) = delete;

 private:
  void* thread_;
};

}  // namespace deep_ep::host_machine
