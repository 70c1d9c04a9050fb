// Processes of tests, which end with the program that started them, also when that is killed.
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

namespace deep_ep::test {

/// In a child, before it does anything that takes long: it is killed when the thread that started it ends. (That one
/// waits for its children, so it ends first only by force.) `parent`: the process of that thread, from before the
/// start.
inline void end_with(pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const pid_t now = ::getppid();              // 0: one of another PID namespace
  if (now != parent && now != 0) ::_exit(1);  // it has ended already
}

/// fork(), and the child ends with the thread that calls this.
inline pid_t fork_child() {
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child == 0) end_with(parent);
  return child;
}

}  // namespace deep_ep::test
