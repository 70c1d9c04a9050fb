// The executor of one GPU. Every method works, whatever device is current in the calling thread.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/executor/backend.hpp"
#include "csrc/executor/cuda/context.hpp"
#include "csrc/executor/cuda/driver.hpp"
#include "csrc/executor/driver_version.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {
namespace cuda {
namespace {

constexpr int kOldestMajor = 9;    // compute capability: thread block bulk copies, mbarriers
constexpr int kWarpsPerBlock = 7;  // what the data-moving kernels were tuned with

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), device, "cudaDeviceGetAttribute({})", static_cast<int>(which));
  return value;
}

/// Kernels wait for each other, so all blocks of a grid must run side by side. Every kernel is built to have one block
/// on an SM, whatever its shape; so what counts is how many SMs the context has: with CUDA MPS, where
/// CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is set, only a part of the GPU's.
int multiprocessors_of(const Context& context) {
  const int of_device = attribute(cudaDevAttrMultiProcessorCount, context.device);
  const CurrentContext current(context);
  CUexecAffinityParam affinity{};
  if (driver().context_affinity(&affinity, CU_EXEC_AFFINITY_TYPE_SM_COUNT) != CUDA_SUCCESS) return of_device;
  const auto of_context = static_cast<int>(affinity.param.smCount.val);
  return of_context > 0 ? std::min(of_device, of_context) : of_device;
}

/// Kernels that play NICs stay on multiprocessors of their own, two at most for each mode that reaches other nodes.
/// They must find them even while all other kernels wait for them.
int kept_for_simulated_nics() { return environment::text("DEEP_EP_RDMA_WIRE").starts_with("simulated") ? 4 : 0; }

LaunchPolicy make_policy(const Context& context) {
  const int shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, context.device);
  return {.multiprocessors = std::max(1, multiprocessors_of(context) - kept_for_simulated_nics()),
          .warps_per_block = kWarpsPerBlock,
          .max_shared_bytes = static_cast<std::size_t>(shared_bytes)};
}

DeviceIdentity identity_of(int device) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), device, "cudaGetDeviceProperties");
  DeviceIdentity identity{.multiprocessors = properties.multiProcessorCount, .kept = kept_for_simulated_nics()};
  std::memcpy(identity.uuid.data(), properties.uuid.bytes, identity.uuid.size());
  return identity;
}

/// Events for reuse: creating one costs several microseconds, recording one less than one.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  EventPool(std::shared_ptr<const Context> context, unsigned flags) : context_(std::move(context)), flags_(flags) {}
  ~EventPool() {
    log::quietly([&] {
      const CurrentContext current(*context_);
      for (cudaEvent_t event : free_) cudaEventDestroy(event);
    });
  }

  /// Records an event on the stream. Unless the stream records a graph it returns to the pool, which it keeps alive,
  /// when the last handle goes.
  EventHandle record(cudaStream_t stream) {
    const CurrentContext current(*context_);
    // An event of a graph that is being recorded belongs to the recording: another thread that meanwhile recorded it on
    // a stream of its own died in the driver. So it does not return.
    const bool captured = capture_id(stream, context_->device) != 0;
    // Waits that are already enqueued keep their moment, so an event may be recorded again at any time.
    EventHandle handle(take(), [pool = shared_from_this(), captured](void* returned) {
      log::quietly([&] { pool->give_back(static_cast<cudaEvent_t>(returned), captured); });
    });
    check(cudaEventRecord(native(handle), stream), context_->device, "cudaEventRecord");
    return handle;
  }

  static cudaEvent_t native(const EventHandle& event) { return static_cast<cudaEvent_t>(event.get()); }

 private:
  cudaEvent_t take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    const RelaxedContext current(*context_);
    check(cudaEventCreateWithFlags(&event, flags_), context_->device, "cudaEventCreateWithFlags");
    return event;
  }

  void give_back(cudaEvent_t event, bool captured) {
    if (captured) {
      const RelaxedContext current(*context_);
      cudaEventDestroy(event);
    } else {
      const std::lock_guard lock(mutex_);
      free_.push_back(event);
    }
  }

  std::shared_ptr<const Context> context_;
  unsigned flags_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

cudaStream_t native(StreamHandle stream) { return static_cast<cudaStream_t>(stream); }

class CudaExecutor final : public Backend, public std::enable_shared_from_this<CudaExecutor> {
 public:
  explicit CudaExecutor(int device)
      : context_(std::make_shared<Context>(device)),
        policy_(make_policy(*context_)),
        events_(std::make_shared<EventPool>(context_, cudaEventDisableTiming)),
        timed_events_(std::make_shared<EventPool>(context_, cudaEventDefault)) {}

  Device device() const override { return {Device::Kind::cuda, context_->device}; }
  const LaunchPolicy& policy() const override { return policy_; }
  DeviceIdentity identity() const override { return identity_of(context_->device); }
  bool adds_atomically_to(const DeviceIdentity& device) const override {
    for (int other = 0; other < cuda_device_count(); ++other) {
      if (other == context_->device) continue;
      int there = 0;
      check(cudaDeviceGetP2PAttribute(&there, cudaDevP2PAttrNativeAtomicSupported, context_->device, other),
            context_->device, "cudaDeviceGetP2PAttribute");
      if (there == 0 && identity_of(other).uuid == device.uuid) return false;
    }
    return true;
  }

  void* allocate(std::size_t bytes) override {
    void* memory = nullptr;
    ask<RelaxedContext>([&] { return cudaMalloc(&memory, std::max<std::size_t>(bytes, 1)); }, "cudaMalloc of {}",
                        format_bytes(bytes));
    return memory;
  }
  void free(void* memory) noexcept override {
    log::quietly([&] { ask<RelaxedContext>([&] { return cudaFree(memory); }, "cudaFree"); });
  }
  void free_after(void* memory, StreamHandle stream) noexcept override {
    log::quietly([&] {
      const RelaxedContext current(*context_);
      synchronize(stream);
    });
    free(memory);
  }

  void* allocate_pinned(std::size_t bytes) override {
    constexpr unsigned kFlags = cudaHostAllocPortable | cudaHostAllocMapped;
    void* memory = nullptr;
    bytes = std::max<std::size_t>(bytes, 1);
    ask<RelaxedContext>([&] { return cudaHostAlloc(&memory, bytes, kFlags); }, "cudaHostAlloc of {}",
                        format_bytes(bytes));
    return std::memset(memory, 0, bytes);
  }
  void free_pinned(void* memory) noexcept override {
    log::quietly([&] { ask<RelaxedContext>([&] { return cudaFreeHost(memory); }, "cudaFreeHost"); });
  }

  StreamHandle create_stream() override {
    constexpr int kHighest = std::numeric_limits<int>::min();  // CUDA takes the highest that there is
    cudaStream_t stream = nullptr;
    ask([&] { return cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, kHighest); },
        "cudaStreamCreateWithPriority");
    return stream;
  }
  void destroy_stream(StreamHandle stream) noexcept override {
    if (stream == nullptr) return;
    log::quietly([&] { ask([&] { return cudaStreamDestroy(native(stream)); }, "cudaStreamDestroy"); });
  }

  EventHandle record_event(StreamHandle stream) override { return events_->record(native(stream)); }
  EventHandle record_timed_event(StreamHandle stream) override { return timed_events_->record(native(stream)); }
  void wait_event(StreamHandle stream, const EventHandle& event) override {
    if (!event) return;
    ask([&] { return cudaStreamWaitEvent(native(stream), EventPool::native(event), 0); }, "cudaStreamWaitEvent");
  }
  bool event_done(const EventHandle& event) override {
    if (!event) return true;
    const RelaxedContext current(*context_);
    const cudaError_t result = cudaEventQuery(EventPool::native(event));
    if (result == cudaErrorNotReady || result == cudaErrorCapturedEvent) {
      cudaGetLastError();  // otherwise the next launch would report it
      return false;
    }
    check(result, context_->device, "cudaEventQuery");
    return true;
  }
  void synchronize_event(const EventHandle& event) override {
    if (event) ask([&] { return cudaEventSynchronize(EventPool::native(event)); }, "cudaEventSynchronize");
  }
  double elapsed_seconds(const EventHandle& begin, const EventHandle& end) override {
    float milliseconds = 0;
    ask([&] { return cudaEventElapsedTime(&milliseconds, EventPool::native(begin), EventPool::native(end)); },
        "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  }

  void synchronize(StreamHandle stream) override {
    ask([&] { return cudaStreamSynchronize(native(stream)); }, "cudaStreamSynchronize");
  }
  std::uint64_t capture_id(StreamHandle stream) override {
    const CurrentContext current(*context_);
    return cuda::capture_id(native(stream), context_->device);
  }

  void copy(void* destination, const void* source, std::size_t bytes, StreamHandle stream) override {
    if (bytes == 0) return;
    ask([&] { return cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDefault, native(stream)); },
        "cudaMemcpyAsync of {} bytes", bytes);
  }
  void fill(void* destination, int byte, std::size_t bytes, StreamHandle stream) override {
    if (bytes == 0) return;
    ask([&] { return cudaMemsetAsync(destination, byte, bytes, native(stream)); }, "cudaMemsetAsync of {} bytes",
        bytes);
  }

  void make_current() override {
    // Usually it is current already, which the driver knows from a variable of the thread.
    if (is_current(*context_)) return;
    check(cudaSetDevice(context_->device), context_->device, "cudaSetDevice");
  }

  bool enter() override { return push_current(*context_); }
  void leave() noexcept override { pop_current(); }

  const KernelTable& kernels() const override {
#define DEEP_EP_LAUNCHER(name, Params, max_threads) .name = kernels::name::launch_cuda,
    static const KernelTable table{DEEP_EP_KERNELS(DEEP_EP_LAUNCHER)};
#undef DEEP_EP_LAUNCHER
    return table;
  }
  void load_kernels() const override {
    const CurrentContext current(*context_);
#define DEEP_EP_LOAD(name, Params, max_threads) kernels::name::load_cuda();
    DEEP_EP_KERNELS(DEEP_EP_LOAD)
#undef DEEP_EP_LOAD
  }

  std::unique_ptr<SymmetricHeap> create_heap(Bootstrap& bootstrap, const HeapBytes& bytes_for) override {
    return std::make_unique<SymmetricHeap>(shared_from_this(), make_cuda_heap_memory(context_), bootstrap, bytes_for);
  }

 private:
  /// Makes a call of the runtime on this GPU; `name` and `args` are its name where it fails.
  template <class Guard = CurrentContext, class Call, class... Args>
  void ask(const Call& call, fmt::format_string<const Args&...> name, const Args&... args) const {
    const Guard current(*context_);
    check(call(), context_->device, name, args...);
  }

  std::shared_ptr<const Context> context_;
  LaunchPolicy policy_;
  std::shared_ptr<EventPool> events_;
  std::shared_ptr<EventPool> timed_events_;
};

bool is_new_enough(int device) {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= kOldestMajor;
}

/// Of the driver that is installed here.
std::string refusal_here() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  return driver_refusal(driver, CUDART_VERSION);
}

}  // namespace
}  // namespace cuda

std::shared_ptr<Executor> make_cuda_executor(int device) {
  if (const std::string refusal = cuda::refusal_here(); !refusal.empty()) throw SystemError(refusal);
  int count = 0;
  cuda::check(cudaGetDeviceCount(&count), device, "cudaGetDeviceCount");
  if (device < 0 || device >= count) {
    fail<SystemError>("GPU {} was asked for, the CUDA driver shows {} (CUDA_VISIBLE_DEVICES restricts them)", device,
                      count);
  }
  if (!cuda::is_new_enough(device)) {
    cudaGetLastError();
    fail<SystemError>("GPU {} was asked for and has compute capability {}.{}, needed: {}.0 or later", device,
                      cuda::attribute(cudaDevAttrComputeCapabilityMajor, device),
                      cuda::attribute(cudaDevAttrComputeCapabilityMinor, device), cuda::kOldestMajor);
  }
  return std::make_shared<cuda::CudaExecutor>(device);
}

int cuda_device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  // A program that asks how many GPUs there are goes on on the CPU: once it is told why.
  static std::once_flag told;
  std::call_once(told, [] {
    if (const std::string refusal = cuda::refusal_here(); !refusal.empty()) log::warn("no GPU is used: {}", refusal);
  });
  // Ordinals 0 to the result must all work, so counting ends at the first GPU that does not.
  int usable = 0;
  while (usable < count && cuda::is_new_enough(usable)) ++usable;
  cudaGetLastError();
  return usable;
}

std::string cuda_device_pci_address(int device) {
  cudaDeviceProp at{};
  if (cudaGetDeviceProperties(&at, device) != cudaSuccess) {
    cudaGetLastError();  // the next CUDA call must not report it
    return {};
  }
  return fmt::format("{:04x}:{:02x}:{:02x}.0", at.pciDomainID, at.pciBusID, at.pciDeviceID);
}

}  // namespace deep_ep
