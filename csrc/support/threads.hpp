// Threads of the library: their signals and their names.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace deep_ep {

/// While it lives, the calling thread blocks signals, and so does each thread that it starts, from its first
/// instruction: signals are for the program's own threads. It does not block the signals by which a thread reports its
/// own fault, or is profiled.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t most;
    ::sigfillset(&most);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF}) ::sigdelset(&most, own);
    ::pthread_sigmask(SIG_BLOCK, &most, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

/// For debuggers and `top -H`. At most 15 characters.
inline void name_this_thread(const char* name) { ::pthread_setname_np(::pthread_self(), name); }

}  // namespace deep_ep
