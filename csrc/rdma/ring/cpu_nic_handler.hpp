// The `cpu` handler: a thread that does for any wire what an mlx5 device does for its rings.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "csrc/rdma/ring/nic_handler.hpp"
#include "csrc/rdma/ring/wire.hpp"

namespace deep_ep::rdma {

/// Reads the producer indices that kernels publish, decodes the entries behind them, posts them to its wire and writes
/// completion entries. One thread and one wire for all rings; a process with several NICs has several handlers.
class CpuNicHandler final : public NicHandler {
 public:
  /// Without `start_thread` nothing happens but in step().
  explicit CpuNicHandler(std::unique_ptr<Wire> wire, bool start_thread = true);
  ~CpuNicHandler() override;

  NicHandlerKind kind() const override { return NicHandlerKind::cpu; }
  void add(const HandledRing& ring) override;
  void remove(std::uint32_t number) noexcept override;
  std::optional<Failure> failure() const override;

  /// Is everything done that kernels have rung for so far? Rings that have failed do nothing any more, so they count.
  bool idle() const;

  /// One round over all rings: takes new entries, posts, completes. False if there was nothing to do. Never throws:
  /// what the wire throws becomes the failure of every ring.
  bool step();

 private:
  struct Ring;

  void run(const std::stop_token& stop);
  bool take_entries(Ring& ring);
  bool post(Ring& ring);
  bool complete();
  void apply(const WireCompletion& completion);
  /// Writes the error entry. `failure` has index, syndrome (or only a detail: not the wire's verdict) and vendor code.
  void fail_ring(Ring& ring, Failure failure);
  Ring* find(std::uint32_t number);

  mutable std::mutex mutex_;  ///< a round of the thread, and every other call
  std::unique_ptr<Wire> wire_;
  std::vector<std::unique_ptr<Ring>> rings_;
  std::unordered_map<std::uint32_t, Ring*> by_number_;
  std::vector<WireCompletion> completions_;
  std::optional<Failure> failure_;
  mutable std::atomic<int> waiting_ = 0;  ///< calls that want the mutex: the thread lets them in
  std::jthread thread_;                   ///< last: uses all of the above
};

}  // namespace deep_ep::rdma
