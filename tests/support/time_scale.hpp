// The one scale of time in tests: a deadline is a number of seconds on a quiet machine, times time_factor().
//
// A machine that is busier than expected must not turn a test red, so
// - what a test waits for comes by a signal (a barrier, a byte in a pipe) wherever that can be; only what never comes
//   is waited for by time;
// - where time decides, a test takes its deadline from here, and says beside it what else could go wrong in that time.
//
// Three limits end a test that hangs, each well before the next: the library's own deadline (patience(), 10 s on a
// quiet machine), which says which rank waited for which; the deadline of ranks that are processes
// (cluster_patience()); scripts/run_gtest.py (600 s).
#pragma once

#include <stdlib.h>  // getloadavg

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

namespace deep_ep::test {

/// The variable that sets the factor by hand. Processes of ranks get it from the program that starts them.
inline constexpr const char* kTimeFactorVariable = "DEEP_EP_TEST_TIME_FACTOR";

/// True under ThreadSanitizer, which bounds the number of fibers, and where everything is much slower.
constexpr bool under_thread_sanitizer() {
#ifdef __SANITIZE_THREAD__
  return true;
#else
  return false;
#endif
}

/// Under this one or AddressSanitizer.
constexpr bool under_sanitizer() {
#ifdef __SANITIZE_ADDRESS__
  return true;
#else
  return under_thread_sanitizer();
#endif
}

/// How many times slower than a quiet machine this one is taken to be, at this moment.
inline double measured_time_factor() {
  if (const char* const text = std::getenv(kTimeFactorVariable)) {
    char* end = nullptr;
    const double factor = std::strtod(text, &end);
    if (end != text && *end == '\0' && factor > 0 && std::isfinite(factor)) return factor;
    throw std::invalid_argument(std::string(kTimeFactorVariable) + " is '" + text + "', allowed: a number above 0");
  }
  constexpr double kBuild = under_thread_sanitizer() ? 3 : under_sanitizer() ? 2.5 : 1;
  constexpr double kUsualLoad = 2;  // threads per core that the tests themselves keep busy
  constexpr double kMost = under_thread_sanitizer() ? 9 : 6;
  const double seeded = std::getenv("DEEP_EP_HOST_SEED") != nullptr ? 1.5 : 1;  // additional switches between fibers
  double load = 0;
  if (::getloadavg(&load, 1) != 1) load = 0;
  const double per_core = load / std::max(1u, std::thread::hardware_concurrency());
  return std::min(kMost, kBuild * seeded * std::clamp(per_core / kUsualLoad, 1.0, 4.0));
}

/// The factor in use: measured first when somebody asks, and again by renew_time_factor(). Several clusters may run
/// side by side.
inline std::atomic<double>& time_factor_in_use() {
  static std::atomic<double> factor = measured_time_factor();
  return factor;
}
inline double time_factor() { return time_factor_in_use(); }
/// Before a test starts its ranks, which must all see the same.
inline void renew_time_factor() { time_factor_in_use() = measured_time_factor(); }

/// So many seconds of a quiet machine.
inline double scaled(double seconds) { return seconds * time_factor(); }

/// Seconds to wait for a rank that never comes, where living ranks must not be mistaken for it. Tests wait so long with
/// nothing to do, so it is as short as a busy machine allows: on two busy cores under AddressSanitizer 3.75 s was once
/// too little, and this is 7.5 s there.
inline double short_deadline() { return scaled(3); }

/// Seconds to wait for what does come. Only a test that hangs waits so long.
inline double patience() { return scaled(10); }

/// Seconds until the ranks of a cluster must have ended, also on a machine that becomes busy only meanwhile: four busy
/// programs on two processors make one of ThreadSanitizer fifteen times as slow.
inline double cluster_patience() { return std::clamp(scaled(60), under_sanitizer() ? 400.0 : 200.0, 540.0); }

/// patience() for a rank that sits out while others go through several deadlines, on a machine that may become busy
/// only meanwhile; and for processes that start. Below the deadline of a cluster.
inline double long_patience() { return std::min(scaled(40), cluster_patience() - 20); }

}  // namespace deep_ep::test
