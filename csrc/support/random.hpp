// Random numbers of the system. Not std::random_device: linked statically it needs a newer glibc than everything else.
#pragma once

#include <sys/random.h>

#include "deep_ep/error.hpp"

namespace deep_ep {

/// All bits of T are random.
template <class T>
T random_bits() {
  T bits{};
  // Up to 256 bytes come whole once the system has started, and no signal interrupts that.
  if (::getrandom(&bits, sizeof bits, 0) != sizeof bits) throw SystemError("getrandom gave no random numbers");
  return bits;
}

}  // namespace deep_ep
