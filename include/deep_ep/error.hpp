// Exceptions of the library. Every one derives from deep_ep::Error, so one catch clause sees them all.
#pragma once
// SPDX-License-Identifier: MIT

#include <stdexcept>
#include <string>

namespace deep_ep {

/// Base of everything the library throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An argument breaks a rule. The text names the argument, its value, and the allowed values. The call has sent and
/// changed nothing; the buffer stays usable.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// The arguments are right, but this buffer cannot do what they ask for; the text says why.
class Unsupported : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// Arguments of the ranks do not fit together (another hidden size, another top-k, ...). A dispatch that exchanges
/// counts throws it on every rank before any row moves, and the buffer stays usable. Cached dispatches and combines
/// notice late: peers may time out, and the text says that the buffer must be destroyed.
class RankMismatch : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// The symmetric heap, or a limit fixed when the buffer was made, is too small for the call.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

/// A peer did not come within the deadline, or its process has ended (then at once). The text names the waiting rank,
/// the awaited rank, the kernel and the signal. Destroy the buffer and make a new one.
class TimeoutError : public Error {
 public:
  using Error::Error;
};

/// The object was destroyed (or moved from) before this use.
class UseAfterDestroy : public Error {
 public:
  using Error::Error;
};

/// The system refused a CUDA call, a mapping, a socket, ... The text names the request and the answer.
class SystemError : public Error {
 public:
  using Error::Error;
};

}  // namespace deep_ep
