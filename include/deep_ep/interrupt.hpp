// Waits of the host that the caller may end, as Python does after Ctrl-C.
#pragma once
// SPDX-License-Identifier: MIT

#include <chrono>
#include <functional>

#include "deep_ep/error.hpp"

namespace deep_ep {

/// The caller ended the call's wait. Destroy the buffer and make a new one.
class Interrupted : public Error {
 public:
  using Error::Error;
};

/// While it lives, waits of this thread for kernels or other ranks ask `wanted` a few times a second whether to give
/// up, also those of a bootstrap of this library. If so, the call throws Interrupted. Of scopes in one another only the
/// inner one is asked; its `wanted` may pass the question on by `InterruptScope::wanted()`. On GPUs a dispatch waits
/// for counts; on the CPU check waits, too.
class InterruptScope {
 public:
  /// @param wanted says whether to give up; called by this thread, at most ten times a second.
  explicit InterruptScope(std::function<bool()> wanted);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

  static bool wanted();  ///< asks, at most ten times a second; false without a scope

 private:
  std::function<bool()> wanted_;
  std::chrono::steady_clock::time_point next_;  ///< when it may be asked
  InterruptScope* outer_;
};

}  // namespace deep_ep
