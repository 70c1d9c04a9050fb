// An executor: the device that holds memory and runs kernels, a GPU or the CPU.
#pragma once
// SPDX-License-Identifier: MIT

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// A point in a stream's work. Copyable; cheap. Default-constructed: no event.
using EventHandle = std::shared_ptr<void>;

/// Launch sizes that suit an executor. Kernels work with any sizes.
struct LaunchPolicy {
  int multiprocessors = 1;           ///< SMs of the GPU; on the host, blocks to run at once
  int warps_per_block = 8;           ///< the default of kernels that move rows
  std::size_t max_shared_bytes = 0;  ///< the most dynamic shared memory of a block
};

/// Made by make_host_executor or make_cuda_executor: a Buffer accepts no other. Thread-safe.
class Executor {
 public:
  virtual ~Executor() = default;

  /// The device of its memory: {cuda, ordinal}, or {cpu, 0}.
  virtual Device device() const = 0;
  /// Constant for the executor's life.
  virtual const LaunchPolicy& policy() const = 0;

  // A StreamHandle is a stream of this executor, or nullptr for its default stream. Methods that enqueue return at
  // once. All methods throw SystemError if the system refuses.

  /// Device memory (host executor: ordinary memory), aligned to at least 256 bytes, contents undefined. Slow. Legal
  /// while a graph is being captured. Throws OutOfMemory.
  virtual void* allocate(std::size_t bytes) = 0;
  /// @param memory of `allocate`, no longer used by any stream; or nullptr.
  virtual void free(void* memory) noexcept = 0;
  /// Frees it after the work that `stream` holds now, for which the host waits on a GPU.
  /// @param memory of `allocate`; or nullptr.
  virtual void free_after(void* memory, StreamHandle stream) noexcept = 0;

  /// Zero-filled memory that the host and kernels read and write at the same address. Throws OutOfMemory.
  virtual void* allocate_pinned(std::size_t bytes) = 0;
  /// @param memory of `allocate_pinned`, no longer used by any stream; or nullptr.
  virtual void free_pinned(void* memory) noexcept = 0;

  virtual StreamHandle create_stream() = 0;  ///< non-blocking, high priority
  /// @param stream of `create_stream`. Its work need not have ended.
  virtual void destroy_stream(StreamHandle stream) noexcept = 0;
  /// The event of all work enqueued on `stream` so far.
  virtual EventHandle record_event(StreamHandle stream) = 0;
  /// Work that is enqueued on `stream` later comes after `event`; the host does not wait. No event: nothing.
  virtual void wait_event(StreamHandle stream, const EventHandle& event) = 0;
  /// Whether the work before `event` has ended; true for no event. Does not wait. False while the event is being
  /// recorded into a CUDA graph.
  virtual bool event_done(const EventHandle& event) = 0;
  /// Blocks the host until the work before `event` has ended; returns at once for no event.
  virtual void synchronize_event(const EventHandle& event) = 0;
  /// Blocks the host until the stream's work has ended. Throws its errors (on the host executor kernel faults).
  virtual void synchronize(StreamHandle stream) = 0;
  /// The number of the recording of a CUDA graph that the stream takes part in, another one for each; 0: none (always
  /// on the host).
  virtual std::uint64_t capture_id(StreamHandle stream) = 0;
  /// True while the stream records a CUDA graph.
  bool is_capturing(StreamHandle stream) { return capture_id(stream) != 0; }

  /// Enqueues a copy of `bytes` bytes from `source` to `destination`, between any two of device, pinned and ordinary
  /// memory of this process; the ranges do not overlap. Both must stay as they are until it has ended. (A CUDA copy of
  /// ordinary memory may make the host wait.)
  virtual void copy(void* destination, const void* source, std::size_t bytes, StreamHandle stream) = 0;
  /// Enqueues that each of `bytes` bytes from `destination` on becomes `byte` (its lowest 8 bits).
  virtual void fill(void* destination, int byte, std::size_t bytes, StreamHandle stream) = 0;

  /// Seconds from `begin` to `end`, two events of record_timed_event whose work has ended: otherwise InvalidArgument on
  /// the host executor, SystemError on a GPU.
  virtual double elapsed_seconds(const EventHandle& begin, const EventHandle& end) = 0;
  /// An event for elapsed_seconds.
  virtual EventHandle record_timed_event(StreamHandle stream) = 0;

  /// Makes this executor's device current for the calling thread (CUDA), no-op on the host.
  virtual void make_current() = 0;
  /// Makes the device current until leave(). Returns true if the thread must call leave(), which restores the previous
  /// device.
  virtual bool enter() { return make_current(), false; }
  /// Restores the device that was current before enter(), which returned true.
  virtual void leave() noexcept {}
};

/// While it lives, the executor's device is current for the calling thread.
class DeviceScope {
 public:
  /// Makes the executor's device current.
  explicit DeviceScope(Executor& executor) : left_(executor.enter() ? &executor : nullptr) {}
  ~DeviceScope() {
    if (left_ != nullptr) left_->leave();
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  Executor* left_;
};

/// Options of make_host_executor. 0: the default.
struct HostExecutorOptions {
  int multiprocessors = 0;  ///< the most blocks of a kernel (default 4)
  int warps_per_block = 0;  ///< default 3
  /// Schedule: 0 is a fixed order, another number a pseudo-random one. DEEP_EP_HOST_SEED overrides 0.
  std::uint64_t seed = 0;
  std::size_t max_shared_bytes = 0;  ///< default 64 KiB
};

/// Runs kernels as fibers on CPU threads, in ordinary memory (heaps: shared memory). Always available.
/// @param options sizes and schedule.
std::shared_ptr<Executor> make_host_executor(const HostExecutorOptions& options = {});

/// The GPU with this ordinal. Throws SystemError if the library was built without CUDA or there is no such GPU.
std::shared_ptr<Executor> make_cuda_executor(int device);

/// The number of GPUs for make_cuda_executor; 0 without CUDA, driver or GPU. Never throws.
int cuda_device_count() noexcept;

/// The PCI address of a GPU, as "0000:01:00.0", which does not depend on CUDA_VISIBLE_DEVICES. Empty if CUDA does not
/// know it.
/// @param device its ordinal in this process.
std::string cuda_device_pci_address(int device);

}  // namespace deep_ep
