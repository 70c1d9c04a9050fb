// The language that the headers are written in. Included first, so that a program built for an older one reads this
// error before any other.
#pragma once
// SPDX-License-Identifier: MIT

#if __cplusplus < 201709L  // g++ 10 says this with -std=c++20
#error "deep_ep needs C++20: compile with -std=c++20 (CMake: target_compile_features(TARGET PRIVATE cxx_std_20))"
#endif
