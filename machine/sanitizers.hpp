// ThreadSanitizer and AddressSanitizer learn of fibers here. Empty functions in ordinary builds.
//
// ThreadSanitizer keeps a context (clock, call stack) for each thread. Here every fiber has its own, every stream has
// one for its copies, and the machine itself runs in its worker's, in which everything is ignored. Switching between
// contexts synchronises nothing. So the only happens-before edges among kernel threads are those that acquire() and
// release() below draw, where a GPU would synchronise too.
#pragma once

#include <cstddef>

#include "kernels/primitives/target.hpp"

#if DEEP_EP_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreSyncBegin(const char* file, int line);
void __tsan_read_range(void* begin, long bytes);  // signed as GCC has it built in
}
// Functions that change the context in their middle must not be instrumented.
#define DEEP_EP_NO_TSAN __attribute__((no_sanitize("thread")))
#else
#define DEEP_EP_NO_TSAN
#endif

#if DEEP_EP_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace deep_ep::host_machine::tsan {

#if DEEP_EP_TSAN
inline void* create_context() { return __tsan_create_fiber(0); }
inline void destroy_context(void* context) { __tsan_destroy_fiber(context); }
inline void* current_context() { return __tsan_get_current_fiber(); }
DEEP_EP_NO_TSAN inline void switch_context(void* context) {
  __tsan_switch_to_fiber(context, __tsan_switch_to_fiber_no_sync);
}
inline void acquire(const void* point) { __tsan_acquire(const_cast<void*>(point)); }
inline void release(const void* point) { __tsan_release(const_cast<void*>(point)); }
inline void read(const void* begin, std::size_t bytes) {
  __tsan_read_range(const_cast<void*>(begin), static_cast<long>(bytes));
}
/// From here on nothing that the calling thread does in its own context is looked at.
inline void ignore_this_thread() {
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
}
#else
inline void* create_context() { return nullptr; }
inline void destroy_context(void*) {}
inline void* current_context() { return nullptr; }
inline void switch_context(void*) {}
inline void acquire(const void*) {}
inline void release(const void*) {}
inline void read(const void*, std::size_t) {}
inline void ignore_this_thread() {}
#endif

/// Runs a scope in another context, then returns to the one that was current. Functions of the machine that kernel
/// threads call begin with the worker's: ThreadSanitizer looks away until the thread goes on.
class Scope {
 public:
  DEEP_EP_NO_TSAN explicit Scope(void* context) : before_(current_context()) { switch_context(context); }
  DEEP_EP_NO_TSAN ~Scope() { switch_context(before_); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  void* before_;
};

// The point's address is worked out before the context changes: it may be in a local variable of the caller.
DEEP_EP_NO_TSAN inline void acquire_as(void* context, const void* point) {
  const Scope as(context);
  acquire(point);
}
DEEP_EP_NO_TSAN inline void release_as(void* context, const void* point) {
  const Scope as(context);
  release(point);
}

}  // namespace deep_ep::host_machine::tsan
