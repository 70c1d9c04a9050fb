// The executor of machines without a GPU.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "csrc/executor/backend.hpp"
#include "machine/stream.hpp"

namespace deep_ep {

class HostExecutor final : public Backend {
 public:
  explicit HostExecutor(const HostExecutorOptions& options);
  ~HostExecutor() override;

  Device device() const override { return {Device::Kind::cpu, 0}; }
  const LaunchPolicy& policy() const override { return policy_; }

  void* allocate(std::size_t bytes) override;
  void free(void* memory) noexcept override;
  void free_after(void* memory, StreamHandle stream) noexcept override;
  void* allocate_pinned(std::size_t bytes) override;
  void free_pinned(void* memory) noexcept override;

  StreamHandle create_stream() override;
  void destroy_stream(StreamHandle stream) noexcept override;
  EventHandle record_event(StreamHandle stream) override;
  void wait_event(StreamHandle stream, const EventHandle& event) override;
  bool event_done(const EventHandle& event) override;
  void synchronize_event(const EventHandle& event) override;
  void synchronize(StreamHandle stream) override;
  bool is_capturing(StreamHandle) override { return false; }

  void copy(void* destination, const void* source, std::size_t bytes, StreamHandle stream) override;
  void fill(void* destination, int byte, std::size_t bytes, StreamHandle stream) override;

  double elapsed_seconds(const EventHandle& begin, const EventHandle& end) override;
  EventHandle record_timed_event(StreamHandle stream) override { return record_event(stream); }

  /// From now on a kernel that this thread launches into stream nullptr goes to this executor's default stream.
  void make_current() override;

  const KernelTable& kernels() const override;
  void load_kernels() const override {}
  std::unique_ptr<SymmetricHeap> create_heap(Bootstrap& bootstrap, const HeapOptions& options) override;

 private:
  using Stream = host_machine::HostStream;

  std::shared_ptr<Stream> make_stream();
  Stream& stream(StreamHandle handle);

  LaunchPolicy policy_;
  host_machine::WorkerPool& pool_;
  std::uint64_t owner_;  ///< this executor's number in the pool
  std::uint64_t seed_;
  std::atomic<std::uint64_t> streams_made_{0};
  std::shared_ptr<Stream> default_stream_;
  std::mutex mutex_;
  std::unordered_map<void*, std::shared_ptr<Stream>> streams_;  ///< by handle
};

}  // namespace deep_ep
