#pragma once

#include <cstddef>

namespace deep_ep::test {

inline constexpr std::size_t kKiB = 1024;
inline constexpr std::size_t kMiB = 1024 * kKiB;

}  // namespace deep_ep::test
