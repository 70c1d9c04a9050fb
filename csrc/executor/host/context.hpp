// A place in the program that can be left and continued: a worker's own stack, or a fiber's.
#pragma once

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>

#include "csrc/executor/host/sanitizers.hpp"

namespace deep_ep::host_machine {

struct Context {
  boost::context::detail::fcontext_t point = nullptr;  ///< where it goes on; set while it is not running
  const void* stack_bottom = nullptr;                  ///< lowest address; with the size, for AddressSanitizer
  std::size_t stack_size = 0;
  Context* target = nullptr;  ///< whom it switched to last: how a new fiber learns who it is
};

/// Leaves `from` and goes on in `to`. Returns when somebody switches to `from` again; never, when it is `final`.
DEEP_EP_NO_TSAN inline void switch_to(Context& from, Context& to, [[maybe_unused]] bool final = false) {
  from.target = &to;
#if DEEP_EP_ASAN
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(final ? nullptr : &fake_stack, to.stack_bottom, to.stack_size);
#endif
  const auto back = boost::context::detail::jump_fcontext(to.point, &from);
#if DEEP_EP_ASAN
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  static_cast<Context*>(back.data)->point = back.fctx;
}

}  // namespace deep_ep::host_machine
