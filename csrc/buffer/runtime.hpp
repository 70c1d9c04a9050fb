// The inside of a Buffer: its modes, and what they share: ranks, heap, streams, order of calls, faults.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "csrc/bootstrap/buffer_exchanges.hpp"
#include "csrc/buffer/buffer_plan.hpp"
#include "csrc/buffer/call_scope.hpp"
#include "csrc/buffer/faults.hpp"
#include "csrc/buffer/options.hpp"
#include "csrc/control/membership.hpp"
#include "csrc/executor/backend.hpp"
#include "csrc/memory/executor_memory.hpp"
#include "csrc/memory/node_membership.hpp"
#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/support/home_process.hpp"
#include "csrc/support/program_code.hpp"
#include "deep_ep/buffer.hpp"

namespace deep_ep {

class NormalMode;
class LowLatency;

class Runtime {
 public:
  /// Collective.
  Runtime(const std::shared_ptr<Bootstrap>& bootstrap, std::shared_ptr<Executor> executor,
          const BufferOptions& options);
  /// Unmaps the peers' memory.
  ~Runtime();
  /// Ends a buffer without the other ranks: waits for this rank's work, and says goodbye. Its memory stays until the
  /// process ends where the work does not end in time, and in a forked child.
  static void end(std::unique_ptr<Runtime> runtime) noexcept;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  BufferExchanges& bootstrap() const { return *bootstrap_; }
  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  const BufferOptions& options() const { return plan_.options; }
  double timeout_s() const { return *options().timeout_s; }

  const std::shared_ptr<Backend>& executor() const { return executor_; }
  Device device() const { return executor_->device(); }
  /// The executor's, for this rank's part of the device.
  const LaunchPolicy& policy() const { return policy_; }
  bool on_gpu() const { return device().kind == Device::Kind::cuda; }
  /// Of a call: `num_sms`, or where that is 0 as many as the library takes by default.
  int sms(int num_sms, int by_default) const {
    return std::min(num_sms != 0 ? num_sms : by_default, policy_.multiprocessors);
  }
  /// Of each block: the most that a GPU has registers for; on the CPU no more than usual.
  int warps(int most_threads) const {
    return on_gpu() ? most_threads / 32 : std::min(policy_.warps_per_block, most_threads / 32);
  }
  /// For set-up and tear-down, where the host waits. Calls choose their streams: see CallScope.
  StreamHandle comm_stream() const { return calls_->comm_stream; }

  const std::shared_ptr<SymmetricHeap>& heap() const { return heap_; }
  const HeapLayout& layout() const { return plan_.layout; }
  std::byte* window() const { return heap_->local() + layout().window_at(); }
  const NodeMembership& nodes() const { return plan_.nodes; }
  const BufferPlan& plan() const { return plan_; }
  /// The same on all ranks.
  bool uses_rdma() const { return plan_.grid.others() != 0 || !plan_.reach.far.empty(); }
  /// With RDMA: those of a place in BufferPlan::connections(), until destroy.
  rdma::Connections& connections(std::size_t place) const { return *connections_[place]; }

  const CallContext& calls() const { return *calls_; }
  /// The scope of a new call; throws what an earlier one has met instead.
  CallScope begin(const CallOptions& call) {
    faults_->raise();
    return CallScope(*calls_, call);
  }
  template <class Params>
  void launch(const KernelChoice<Params>& kernel, const std::type_identity_t<Params>& params, const LaunchShape& shape,
              const CallScope& scope) const {
    (executor_->kernels().*kernel.launcher)(params, shape, scope.stream());
  }
  Faults& faults() { return *faults_; }
  /// See Buffer::check.
  void check(bool wait);
  /// Of the control plane; null where it is off.
  control::Membership* membership() const { return membership_.get(); }
  const ControlWords& control_words() const { return *control_words_; }

  /// Device memory full of zeros, for the whole life of a mode.
  template <class T>
  std::shared_ptr<T> zeroed_memory(std::size_t bytes = sizeof(T)) const {
    auto memory = device_memory<T>(executor_, bytes);
    executor_->fill(memory.get(), 0, bytes, comm_stream());
    executor_->synchronize(comm_stream());
    return memory;
  }

  /// In the part of the heap that peers may read: see Buffer::in_heap.
  bool in_heap(const ConstTensorView& tensor) const;

  std::string describe() const;

  const HomeProcess home;
  std::unique_ptr<NormalMode> normal_mode;
  std::shared_ptr<LowLatency> low_latency;  ///< null without memory for it; hooks ask whether it is there

 private:
  friend class Buffer;
  friend class BufferCall;

  void make(const std::shared_ptr<Backend>& backend, const BufferOptions& asked);
  void end_waits_for_the_gone() const;
  std::vector<bool> check_replaced(const Bootstrap& group, std::span<const int> ranks) const;
  void check_newcomers(const AgreedOptions& agreed, const std::vector<bool>& is_new) const;
  /// For a rank that waits in vain: what has become of all that was posted to NICs. Empty where there is none.
  std::string describe_health() const;
  /// What this rank has posted has reached its peers.
  void drain() noexcept;
  /// The host waits for this rank's work, which may have failed. False: it has not ended, and the others are told.
  bool settle_last_work() noexcept;

  std::unique_ptr<BufferExchanges> bootstrap_;
  int rank_ = 0, num_ranks_ = 0;
  std::vector<ProcessIdentity> processes_;
  std::shared_ptr<Backend> executor_;
  std::shared_ptr<ControlWords> control_words_;  ///< pinned
  std::shared_ptr<control::Membership> membership_;
  LaunchPolicy policy_;
  BufferPlan plan_;
  std::shared_ptr<SymmetricHeap> heap_;
  std::optional<CallContext> calls_;
  std::vector<std::unique_ptr<rdma::Connections>> connections_;  ///< none, or as BufferPlan::connections()
  std::optional<Faults> faults_;
  bool only_low_latency_ = false;            ///< some ranks have no count of the other calls of this buffer
  std::atomic<const char*> call_ = nullptr;  ///< of the thread that is in one; nullptr: none is
  std::atomic<std::thread::id> calling_thread_ = std::thread::id();
  // Of the thread that is in a call.
  int depth_ = 0;  ///< of ProgramCode when it began
  bool suspended_ = false;
};

/// Error in a child forked after the buffer was made.
inline void check_home(const Runtime& buffer, const std::string& call) {
  if (!buffer.home.left()) return;
  fail<Error>("{} in a child forked after the buffer was made: only the process that made it can use it", call);
}

/// The inside of a buffer. UseAfterDestroy, or Error in a child forked after the buffer was made.
inline Runtime& alive(const std::unique_ptr<Runtime>& buffer, const char* call) {
  if (!buffer) fail<UseAfterDestroy>("Buffer::{} after destroy", call);
  if (buffer->home.left()) check_home(*buffer, fmt::format("Buffer::{}", call));
  return *buffer;
}

/// A call of a buffer, from its begin to its end. Two at once would put the calls of ranks into different orders: an
/// error here names that, where the peers would only see calls that never come. A call that a call makes is part of it.
class BufferCall {
 public:
  /// @param call for messages; a literal. @param while_suspended the call may come then. @throws Error where another
  /// thread is in a call, or this one runs ProgramCode in it, InvalidArgument while the buffer is suspended.
  BufferCall(Runtime& runtime, const char* call, bool while_suspended = false) : runtime_(runtime), name_(call) {
    const bool within = runtime.calling_thread_.load(std::memory_order_relaxed) == std::this_thread::get_id();
    if (within && ProgramCode::depth() == runtime.depth_) return;
    const char* other = nullptr;
    if (!runtime.call_.compare_exchange_strong(other, call, std::memory_order_acquire)) {
      if (within) {
        fail<Error>("{}: this thread is in {} of the same buffer, which goes on, allowed: after that has returned",
                    call, other);
      }
      fail<Error>("{}: the buffer is in use by another thread, which is in {}, allowed: one thread at a time", call,
                  other);
    }
    if (runtime.suspended_ && !while_suspended) {
      runtime.call_.store(nullptr, std::memory_order_release);
      fail<InvalidArgument>("{}: the buffer is suspended, allowed: resume, check and destroy", call);
    }
    runtime.calling_thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    runtime.depth_ = ProgramCode::depth();
    outermost_ = true;
  }
  BufferCall(const std::unique_ptr<Runtime>& buffer, const char* call, bool while_suspended = false)
      : BufferCall(alive(buffer, call), call, while_suspended) {}
  ~BufferCall() {
    if (!outermost_) return;
    runtime_.calling_thread_.store(std::thread::id(), std::memory_order_relaxed);
    runtime_.call_.store(nullptr, std::memory_order_release);
  }
  BufferCall(const BufferCall&) = delete;
  BufferCall& operator=(const BufferCall&) = delete;

  Runtime& runtime() const { return runtime_; }
  Runtime* operator->() const { return &runtime_; }
  /// Not a call within another one.
  bool outermost() const { return outermost_; }
  /// Among ranks of one node, or between nodes; InvalidArgument where neither is possible. `moves_tokens`: also where
  /// there is no window.
  NormalMode& normal(bool moves_tokens = true) const;
  LowLatency& low_latency() const;
  /// The same for a call about masks; InvalidArgument where ranks are never masked.
  LowLatency& masking() const;

 private:
  Runtime& runtime_;
  const char* name_;
  bool outermost_ = false;
};

}  // namespace deep_ep
