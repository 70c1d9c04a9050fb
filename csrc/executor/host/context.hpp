// A place in the program that can be left and continued: a worker's own stack, or a fiber's.
// Boost.Context switches in a few nanoseconds; without it ucontext does, which asks the kernel every time.
#pragma once

#include <cstddef>

#include "csrc/executor/host/sanitizers.hpp"

#if DEEP_EP_HAVE_BOOST_CONTEXT
#include <boost/context/detail/fcontext.hpp>
#else
#include <ucontext.h>
#endif

namespace deep_ep::host_machine {

struct Context {
#if DEEP_EP_HAVE_BOOST_CONTEXT
  boost::context::detail::fcontext_t place = nullptr;  ///< where it goes on; set while it is not running
#else
  ucontext_t place;
#endif
  const void* stack_bottom = nullptr;  ///< lowest address; with the size, for AddressSanitizer
  std::size_t stack_size = 0;
  void (*enter)(Context&) = nullptr;  ///< what a new one does first; does not return
  Context* target = nullptr;          ///< whom it switched to last: how a new one learns who it is
};

namespace detail {

DEEP_EP_NO_TSAN inline void arrived() {
#if DEEP_EP_ASAN
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

#if DEEP_EP_HAVE_BOOST_CONTEXT
DEEP_EP_NO_TSAN inline void begin(boost::context::detail::transfer_t from) {
  arrived();
  auto* before = static_cast<Context*>(from.data);
  before->place = from.fctx;
  before->target->enter(*before->target);
}
#else
inline constinit thread_local Context* beginner = nullptr;  // makecontext passes no pointers
DEEP_EP_NO_TSAN inline void begin() {
  arrived();
  beginner->enter(*beginner);
}
#endif

}  // namespace detail

/// The next switch to `context` calls enter(context) on its stack.
inline void prepare(Context& context, void (*enter)(Context&)) {
  context.enter = enter;
  auto* bottom = static_cast<std::byte*>(const_cast<void*>(context.stack_bottom));
#if DEEP_EP_HAVE_BOOST_CONTEXT
  context.place =
      boost::context::detail::make_fcontext(bottom + context.stack_size, context.stack_size, &detail::begin);
#else
  getcontext(&context.place);
  context.place.uc_stack.ss_sp = bottom;
  context.place.uc_stack.ss_size = context.stack_size;
  context.place.uc_link = nullptr;
  makecontext(&context.place, &detail::begin, 0);
#endif
}

/// Leaves `from` and goes on in `to`. Returns when somebody switches to `from` again; never, when it is `final`.
DEEP_EP_NO_TSAN inline void switch_to(Context& from, Context& to, [[maybe_unused]] bool final = false) {
  from.target = &to;
#if DEEP_EP_ASAN
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(final ? nullptr : &fake_stack, to.stack_bottom, to.stack_size);
#endif
#if DEEP_EP_HAVE_BOOST_CONTEXT
  const auto back = boost::context::detail::jump_fcontext(to.place, &from);
#else
  detail::beginner = &to;
  swapcontext(&from.place, &to.place);
#endif
#if DEEP_EP_ASAN
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
#if DEEP_EP_HAVE_BOOST_CONTEXT
  static_cast<Context*>(back.data)->place = back.fctx;
#endif
}

}  // namespace deep_ep::host_machine
