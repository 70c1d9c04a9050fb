// Where a NIC is tested: memory, queue pairs in pairs, and launches of the kernel that uses them. With one rank a NIC
// talks to itself, with two it talks to another machine's; both sides do the same.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/executor/backend.hpp"
#include "csrc/executor/own_stream.hpp"
#include "csrc/rdma/ends.hpp"
#include "deep_ep/bootstrap.hpp"
#include "kernels/rdma/nic_test.hpp"

namespace deep_ep::rdma::nic_test {

inline constexpr int kMostPairs = 8;
inline constexpr std::uint32_t kDepth = 1024;
inline constexpr std::uint32_t kBatch = 64;

/// Makes the ends of one side; throws where the device refuses.
using MakeEnds = std::function<std::unique_ptr<Ends>(const SymmetricHeap& heap, const EndsOptions& options)>;

struct Task {
  NicTestTask what = NicTestTask::entries;
  int pairs = 1;
  std::uint64_t operations = UINT64_MAX;  ///< enough of them
  double seconds = 0;                     ///< enough time
};

/// What came of a task.
struct Run {
  std::vector<NicTestResult> sent;      ///< by the sender of each pair
  std::vector<NicTestResult> received;  ///< by its receiver
  std::optional<FaultRecord> fault;     ///< what ended the task early, if something did
  std::string health;                   ///< with a fault: what the device says

  std::uint64_t operations() const;
  std::uint64_t bytes() const;
  double seconds() const;  ///< of the slowest sender
  /// The first receiver that saw something wrong, or null.
  const NicTestResult* wrong() const;
};

class Bench {
 public:
  /// Collective. `wait_s`: how long a sender waits for what must come; a receiver waits twice as long.
  Bench(Bootstrap& bootstrap, const std::shared_ptr<Executor>& executor, double wait_s);
  ~Bench();
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  /// Collective. Queue pairs for tasks of up to `pairs` pairs, in place of those there were. What a rank throws, all
  /// throw.
  void connect(const MakeEnds& make, int pairs);
  /// Collective.
  Run run(const Task& task);
  /// Collective. Is it true on any rank?
  bool anywhere(bool mine) const;

  const Ends& ends() const { return *ends_; }
  bool alone() const { return bootstrap_.size() == 1; }
  double wait_s() const { return wait_s_; }

 private:
  void clear(const Task& task);

  Bootstrap& bootstrap_;
  std::shared_ptr<Backend> executor_;
  double wait_s_;
  OwnStream stream_;
  std::unique_ptr<SymmetricHeap> heap_;
  RdmaPeerParams* queues_ = nullptr;  ///< pinned
  NicTestResult* results_ = nullptr;  ///< pinned
  FaultRecord* faults_ = nullptr;     ///< pinned
  WaitContext* waits_ = nullptr;      ///< pinned
  std::uint64_t* abort_ = nullptr;
  std::unique_ptr<Ends> ends_;  ///< last: uses the rest
};

}  // namespace deep_ep::rdma::nic_test
