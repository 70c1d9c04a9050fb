// The copy engines: contiguous bytes from every GPU to every other, with no kernel and no look at the data. No library
// can route tokens faster than this moves blocks, as long as SMs are not faster than the engines.
#include "tools/bench/peers.hpp"

#if DEEP_EP_HAVE_CUDA
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "deep_ep/error.hpp"
#endif

namespace deep_ep::tools {

#if DEEP_EP_HAVE_CUDA
namespace {

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) {
    cudaGetLastError();  // otherwise the next launch reports it again
    throw SystemError(fmt::format("{}: {}", what, cudaGetErrorString(result)));
  }
}

/// What a rank tells its peers about the memory it receives in.
struct Window {
  pid_t process = 0;
  int device = 0;
  void* address = nullptr;  ///< as the process itself sees it
  cudaIpcMemHandle_t handle{};
};

class CopyEngineTransport final : public PeerTransport {
 public:
  CopyEngineTransport(Bootstrap& bootstrap, Executor& executor)
      : bootstrap_(bootstrap), device_(executor.device().index), ranks_(static_cast<std::size_t>(bootstrap.size())) {
    executor.make_current();
    check(cudaSetDevice(device_), "cudaSetDevice");  // this program's CUDA runtime may differ from the library's
    const pid_t process = getpid();
    const std::vector<std::byte> processes = bootstrap.all_gather(std::as_bytes(std::span(&process, 1)));
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      separate_ = separate_ || std::memcmp(processes.data() + rank * sizeof(process), &process, sizeof(process)) != 0;
    }
    streams_.resize(ranks_);
    done_.resize(ranks_);
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      check(cudaStreamCreateWithFlags(&streams_[rank], cudaStreamNonBlocking), "cudaStreamCreate");
      check(cudaEventCreateWithFlags(&done_[rank], cudaEventDisableTiming), "cudaEventCreate");
    }
    check(cudaEventCreateWithFlags(&begin_, cudaEventDisableTiming), "cudaEventCreate");
  }
  ~CopyEngineTransport() override {
    try {
      release();
    } catch (const std::exception&) {  // a peer is gone: there is nobody left to wait for
    }
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      cudaStreamDestroy(streams_[rank]);
      cudaEventDestroy(done_[rank]);
    }
    cudaEventDestroy(begin_);
  }

  std::string name() const override { return "copy engine"; }
  int num_sms() const override { return 0; }

  void prepare(std::span<const std::int64_t> send, std::span<const std::int64_t> receive) override {
    release();
    send_bytes_.assign(send.begin(), send.end());
    std::size_t to_send = 256;
    std::size_t to_receive = 256;
    std::vector<std::int64_t> offsets;  // of each source in the memory of this rank
    for (const std::int64_t bytes : send) to_send += static_cast<std::size_t>(bytes);
    for (const std::int64_t bytes : receive) {
      offsets.push_back(static_cast<std::int64_t>(to_receive - 256));
      to_receive += static_cast<std::size_t>(bytes);
    }
    check(cudaMalloc(&send_, to_send), "cudaMalloc");
    Window mine{getpid(), device_, nullptr, {}};
    check(cudaMalloc(&mine.address, to_receive), "cudaMalloc");
    if (separate_) check(cudaIpcGetMemHandle(&mine.handle, mine.address), "cudaIpcGetMemHandle");
    receive_ = mine.address;

    const auto self = static_cast<std::size_t>(bootstrap_.rank());
    const std::vector<std::byte> all = bootstrap_.all_gather(std::as_bytes(std::span(&mine, 1)));
    const std::vector<std::byte> all_offsets = bootstrap_.all_gather(std::as_bytes(std::span(offsets)));
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      Window window;
      std::int64_t offset = 0;
      std::memcpy(&window, all.data() + rank * sizeof(Window), sizeof(Window));
      std::memcpy(&offset, all_offsets.data() + (rank * ranks_ + self) * sizeof(offset), sizeof(offset));
      targets_.push_back(static_cast<char*>(map(window)) + offset);
    }
  }

  void enqueue(StreamHandle stream) override {
    auto* cuda_stream = static_cast<cudaStream_t>(stream);
    check(cudaEventRecord(begin_, cuda_stream), "cudaEventRecord");
    const auto self = static_cast<std::size_t>(bootstrap_.rank());
    std::vector<std::size_t> offsets(ranks_);
    for (std::size_t rank = 1; rank < ranks_; ++rank) {
      offsets[rank] = offsets[rank - 1] + static_cast<std::size_t>(send_bytes_[rank - 1]);
    }
    // Each rank begins with its neighbour, so that not all write to the same one first.
    for (std::size_t step = 1; step <= ranks_; ++step) {
      const std::size_t rank = (self + step) % ranks_;
      check(cudaStreamWaitEvent(streams_[rank], begin_), "cudaStreamWaitEvent");
      check(cudaMemcpyAsync(targets_[rank], static_cast<const char*>(send_) + offsets[rank],
                            static_cast<std::size_t>(send_bytes_[rank]), cudaMemcpyDeviceToDevice, streams_[rank]),
            "cudaMemcpyAsync");
      check(cudaEventRecord(done_[rank], streams_[rank]), "cudaEventRecord");
      check(cudaStreamWaitEvent(cuda_stream, done_[rank]), "cudaStreamWaitEvent");
    }
  }

 private:
  /// The memory of a peer as this process sees it.
  void* map(const Window& window) {
    if (window.process != getpid()) {
      void* address = nullptr;
      check(cudaIpcOpenMemHandle(&address, window.handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
      mapped_.push_back(address);
      return address;
    }
    if (window.device != device_) {
      const cudaError_t result = cudaDeviceEnablePeerAccess(window.device, 0);
      cudaGetLastError();
      if (result != cudaErrorPeerAccessAlreadyEnabled) check(result, "cudaDeviceEnablePeerAccess");
    }
    return window.address;
  }

  void release() {
    if (send_ == nullptr) return;
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    for (void* address : mapped_) cudaIpcCloseMemHandle(address);
    mapped_.clear();
    targets_.clear();
    bootstrap_.barrier();  // nobody writes here any more
    cudaFree(send_);
    cudaFree(receive_);
    send_ = receive_ = nullptr;
  }

  Bootstrap& bootstrap_;
  int device_;
  std::size_t ranks_;
  bool separate_ = false;  ///< ranks are in different processes
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> done_;
  cudaEvent_t begin_ = nullptr;
  std::vector<std::int64_t> send_bytes_;
  std::vector<char*> targets_;
  std::vector<void*> mapped_;
  void* send_ = nullptr;
  void* receive_ = nullptr;
};

}  // namespace

std::unique_ptr<PeerTransport> make_copy_engine_transport(Bootstrap& bootstrap, Executor& executor) {
  if (executor.device().kind != Device::Kind::cuda) return nullptr;
  return std::make_unique<CopyEngineTransport>(bootstrap, executor);
}
#else
std::unique_ptr<PeerTransport> make_copy_engine_transport(Bootstrap&, Executor&) { return nullptr; }
#endif

}  // namespace deep_ep::tools
