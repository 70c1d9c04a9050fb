// Where a NIC is tested: memory, queue pairs in pairs, and launches of the kernel that uses them. With one rank a NIC
// talks to itself, with two it talks to another machine's; both sides do the same.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "csrc/executor/backend.hpp"
#include "csrc/executor/own_stream.hpp"
#include "csrc/rdma/connections.hpp"
#include "deep_ep/bootstrap.hpp"
#include "simulation/kernels/nic_test.hpp"

namespace deep_ep::rdma::nic_test {

using deep_ep::nic_test::kMostPairs;
inline constexpr std::uint32_t kDepth = 1024;

/// Makes the ends of one side; throws where the device refuses.
using MakeEndsOn = std::function<std::unique_ptr<Ends>(NicHandler handler, const SymmetricHeap& heap,
                                                       const ConnectionOptions& options)>;

struct Task {
  NicTestTask what = deep_ep::nic_test::kEntries;
  int pairs = 1;
  std::uint64_t operations = UINT64_MAX;  ///< enough of them
  double seconds = 0;                     ///< enough time
  double wait_s = 5;                      ///< of a sender, for what must come; a receiver waits twice as long
  std::uint32_t wrong_bits = 0;           ///< of remote keys; the queue pairs are of no use behind such a task
};

/// What came of a task.
struct Run {
  int rank = 0;  ///< this side's
  int pairs = 1;
  double wait_s = 0;                        ///< how long senders waited; with streams the time of these included
  std::uint64_t operations = 0, bytes = 0;  ///< of all senders
  double seconds = 1e-9;                    ///< of the slowest sender
  std::optional<NicTestResult> wrong = {};  ///< of the first receiver that saw something wrong
  std::optional<FaultRecord> fault = {};    ///< what ended the task early, if something did
  std::string health = {};                  ///< with a fault: what the device says
};

class Bench {
 public:
  /// Collective.
  Bench(Bootstrap& bootstrap, const std::shared_ptr<Executor>& executor);
  ~Bench();
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  /// Collective. Queue pairs for tasks of up to `pairs` pairs, in place of those there were. What a rank throws, all
  /// throw. `handler`: as make_connected_ends() takes it.
  void connect(NicHandler handler, const MakeEndsOn& make, int pairs);
  /// Collective.
  Run run(const Task& task);
  /// Ends the queue pairs, and with them who hears of their failures.
  void disconnect() { ends_.reset(); }

  /// Null where there are none.
  const Ends* ends() const { return ends_.get(); }

 private:
  /// Collective: a step after which all ranks meet. What a rank throws, all throw.
  void together(std::string_view what, const std::function<void(Bootstrap& ranks)>& step);

  Bootstrap& bootstrap_;
  std::shared_ptr<Backend> executor_;
  OwnStream stream_;
  std::unique_ptr<SymmetricHeap> heap_;
  NicTestParams params_;                    ///< with the queue pairs that are connected
  std::shared_ptr<NicTestResult> results_;  ///< pinned
  std::shared_ptr<FaultRecord> faults_;     ///< pinned
  std::shared_ptr<std::uint64_t> abort_;
  std::unique_ptr<Ends> ends_;  ///< last: uses the rest
};

}  // namespace deep_ep::rdma::nic_test
