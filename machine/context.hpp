// A place in the program that can be left and continued: a worker's own stack, or a fiber's.
// Boost.Context switches in a few nanoseconds; the system's swapcontext would ask the kernel every time.
#pragma once

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>

#include "machine/sanitizers.hpp"

namespace deep_ep::host_machine {

struct Context {
  virtual ~Context() = default;
  /// A new one begins here. Does not return, but leaves by switching away for good.
  virtual void enter() {}

  boost::context::detail::fcontext_t place = nullptr;  ///< where it goes on; set while it is not running
  const void* stack_bottom = nullptr;                  ///< lowest address; with the size, for AddressSanitizer
  std::size_t stack_size = 0;
  Context* target = nullptr;  ///< which one it switched to last: how a new one learns who it is
};

namespace detail {

DEEP_EP_NO_TSAN inline void begin(boost::context::detail::transfer_t from) {
  auto* before = static_cast<Context*>(from.data);
#if DEEP_EP_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &before->stack_bottom, &before->stack_size);  // a worker learns its own
#endif
  before->place = from.fctx;
  before->target->enter();
}

}  // namespace detail

/// The next switch to `context` calls its enter() on its stack.
inline void prepare(Context& context) {
  auto* bottom = static_cast<std::byte*>(const_cast<void*>(context.stack_bottom));
  context.place =
      boost::context::detail::make_fcontext(bottom + context.stack_size, context.stack_size, &detail::begin);
}

/// Leaves `from` and goes on in `to`. Returns when a thread switches to `from` again; never, when it is `final`.
DEEP_EP_NO_TSAN inline void switch_to(Context& from, Context& to, [[maybe_unused]] bool final = false) {
  from.target = &to;
#if DEEP_EP_ASAN
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(final ? nullptr : &fake_stack, to.stack_bottom, to.stack_size);
#endif
  const auto back = boost::context::detail::jump_fcontext(to.place, &from);
#if DEEP_EP_ASAN
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  static_cast<Context*>(back.data)->place = back.fctx;
}

}  // namespace deep_ep::host_machine
