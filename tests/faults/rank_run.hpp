// One rank of a run: makes its buffer, makes the calls of the plan, meets its fault, and checks what it gets.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>

#include "tests/faults/faulty_bootstrap.hpp"
#include "tests/faults/faulty_executor.hpp"
#include "tests/faults/outcome.hpp"

namespace deep_ep::faults {

/// When the fault of a run happened; ranks of other processes see their own only.
class FaultTime {
 public:
  using Clock = std::chrono::steady_clock;
  void now() { at_.store(Clock::now().time_since_epoch().count()); }
  /// Since the fault or since `begin`, whichever came later.
  double seconds_since(Clock::time_point begin) const {
    const Clock::time_point fault{Clock::duration(at_.load())};
    return std::chrono::duration<double>(Clock::now() - std::max(begin, fault)).count();
  }

 private:
  std::atomic<Clock::rep> at_ = 0;
};

struct RankParts {
  int rank = 0;
  std::shared_ptr<FaultyExecutor> executor;
  std::shared_ptr<FaultyBootstrap> bootstrap;
  /// What a rank of a process does to itself at the moment of the fault; nothing for a rank that is a thread.
  std::function<void()> strike = {};
  FaultTime* time = nullptr;
};

/// The rank, with its memory and buffer, which must live until no other rank writes there.
class RankRun {
 public:
  RankRun(const Plan& plan, const Data& data, RankParts parts, double deadline_s);
  ~RankRun();
  RankRun(const RankRun&) = delete;
  RankRun& operator=(const RankRun&) = delete;

  Outcome run();
  /// Ends the buffer. Its heap lives on: another rank's NIC may still write there.
  void drop_buffer();

 private:
  struct Calls;
  const Plan& plan_;
  const Data& data_;
  RankParts parts_;
  double deadline_s_;
  Tensor keeps_heap_;
  std::unique_ptr<test::Rank> rank_;
  std::unique_ptr<Calls> calls_;
};

/// A clean round of every kind of call, on a new buffer that is destroyed at the end. Throws what goes wrong.
void run_clean_round(const std::shared_ptr<Bootstrap>& bootstrap, const std::shared_ptr<Executor>& executor);

}  // namespace deep_ep::faults
