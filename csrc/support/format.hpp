// Text for messages, and the errors that carry it. Host code only: keep this header out of .cu files, so that nvcc does
// not have to compile fmt.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "deep_ep/error.hpp"

namespace deep_ep {

/// Throws an exception of type E whose text is formatted: fail<InvalidArgument>("top-k is {}, allowed: 1 to 32", k).
template <class E, class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> pattern, Args&&... args) {
  throw E(fmt::format(pattern, std::forward<Args>(args)...));
}

/// "17 bytes", "3.50 MiB", "1.25 GiB": short, exact where small.
std::string format_bytes(std::uint64_t bytes);

/// "rank 3", "ranks 1, 4 and 7". For "nobody" when empty.
std::string format_ranks(std::span<const int> ranks);

/// The text of an errno value.
std::string errno_text(int error);

}  // namespace deep_ep
