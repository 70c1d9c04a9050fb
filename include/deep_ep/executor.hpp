// An executor: the device that holds memory and runs kernels, a GPU, or the CPU with the same kernel sources.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// A point in a stream's work. Copyable; cheap. Default-constructed: no event.
using EventHandle = std::shared_ptr<void>;

/// Launch sizes that suit an executor. Kernels work with any; the buffer asks for these.
struct LaunchPolicy {
  int multiprocessors = 1;           ///< SMs of the GPU; on the host, blocks worth running at once
  int max_block_threads = 1024;      ///< upper bound for a block
  int warps_per_block = 8;           ///< what the data-moving kernels use by default
  std::size_t max_shared_bytes = 0;  ///< dynamic shared memory one block may have
};

/// Made by the functions below: a Buffer accepts no other. Thread-safe.
class Executor {
 public:
  virtual ~Executor() = default;

  /// The device of its memory: {cuda, ordinal}, or {cpu, 0}.
  virtual Device device() const = 0;
  /// The same for the executor's whole life.
  virtual const LaunchPolicy& policy() const = 0;

  // A StreamHandle below is one of this executor, or nullptr for its default stream. Methods that enqueue return at
  // once. A refusal of the system is a SystemError.

  /// Device memory (host executor: ordinary memory), aligned to 256 bytes at least, contents undefined.
  /// Not for hot paths. Throws OutOfMemory.
  virtual void* allocate(std::size_t bytes) = 0;
  /// @param memory of `allocate`, no longer used by any stream; or nullptr.
  virtual void free(void* memory) noexcept = 0;

  /// Stream-ordered memory for the small tensors a call returns; comes from a pool, no driver allocation once warm.
  /// Legal while `stream` is being captured. Throws OutOfMemory.
  virtual void* allocate_async(std::size_t bytes, StreamHandle stream) = 0;
  /// Gives it back behind the work enqueued on `stream` so far. @param memory of `allocate_async`.
  virtual void free_async(void* memory, StreamHandle stream) noexcept = 0;
  /// Gives the driver what lies unused in the pool of `allocate_async`, which otherwise keeps it for later requests:
  /// what was given back behind work that has ended. Returns how many bytes that were; 0 on the host executor, which
  /// keeps none. `allocate`, `allocate_async` and a new Buffer do it by themselves where the driver has no memory left.
  virtual std::size_t trim() = 0;

  /// Zero-filled memory that both the host and kernels can read and write, at the same address. Throws OutOfMemory.
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
  /// The caller's own event as an EventHandle, for CallOptions::previous_event and wait_event. CUDA: `native_event` is
  /// a recorded cudaEvent_t of this device, which stays the caller's and must live until the last use of the handle; a
  /// wait is for what was last recorded before it. InvalidArgument for nullptr, and on the host executor, whose events
  /// come from record_event alone.
  virtual EventHandle adopt_event(void* native_event) = 0;
  /// Whether the work before `event` has ended; true for no event. Does not wait. False while the event is being
  /// recorded into a CUDA graph.
  virtual bool event_done(const EventHandle& event) = 0;
  /// Blocks the host until the work before `event` has ended; returns at once for no event.
  virtual void synchronize_event(const EventHandle& event) = 0;
  /// Blocks the host until the stream's work is done. Throws what failed there (kernel faults on the host executor).
  virtual void synchronize(StreamHandle stream) = 0;
  /// True while the stream records a CUDA graph (always false on the host).
  virtual bool is_capturing(StreamHandle stream) = 0;

  /// Enqueues a copy of `bytes` bytes from `source` to `destination`, between any two of device, pinned and ordinary
  /// memory of this process; the ranges do not overlap. Both must stay as they are until it has ended. (A CUDA copy of
  /// ordinary memory may make the host wait.)
  virtual void copy(void* destination, const void* source, std::size_t bytes, StreamHandle stream) = 0;
  /// Enqueues that each of `bytes` bytes from `destination` on becomes `byte` (its lowest 8 bits).
  virtual void fill(void* destination, int byte, std::size_t bytes, StreamHandle stream) = 0;

  /// Seconds from `begin` to `end`, both of record_timed_event on this executor, of work that has ended: otherwise
  /// InvalidArgument on the host executor, SystemError on a GPU.
  virtual double elapsed_seconds(const EventHandle& begin, const EventHandle& end) = 0;
  /// An event that can be timed (costs a little more than record_event).
  virtual EventHandle record_timed_event(StreamHandle stream) = 0;

  /// Makes this executor's device current for the calling thread (CUDA), no-op on the host.
  virtual void make_current() = 0;
};

/// How the CPU stands in for a GPU. Zero: the executor chooses.
struct HostExecutorOptions {
  int multiprocessors = 0;  ///< blocks a kernel gets at most (default 4)
  int warps_per_block = 0;  ///< default 3
  /// Schedule: 0 is a fixed order, anything else a pseudo-random one. DEEP_EP_HOST_SEED overrides 0.
  std::uint64_t seed = 0;
  std::size_t max_shared_bytes = 0;  ///< default 64 KiB
};

/// Kernels run as fibers on CPU threads; memory is ordinary (heaps: shared) memory. Always available.
/// @param options sizes and schedule; zeros leave the choice to the executor.
std::shared_ptr<Executor> make_host_executor(const HostExecutorOptions& options = {});

/// The GPU with this ordinal. Throws SystemError where the library was built without CUDA or there is no such GPU.
std::shared_ptr<Executor> make_cuda_executor(int device);

/// Number of GPUs usable by make_cuda_executor; 0 without CUDA, without driver or without GPU. Never throws.
int cuda_device_count() noexcept;

/// The PCI address of a GPU, as "0000:01:00.0": the same in all processes, whatever CUDA_VISIBLE_DEVICES says. Empty
/// where CUDA does not know it.
/// @param device its ordinal in this process.
std::string cuda_device_pci_address(int device);

}  // namespace deep_ep
