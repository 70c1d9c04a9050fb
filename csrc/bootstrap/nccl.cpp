// Ranks that already talk through NCCL: one GPU per rank.
//
// No call of NCCL counts as done before ncclCommGetAsyncError says so: communicators may be non-blocking, and a peer
// that died shows up only there.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "csrc/bootstrap/polled.hpp"

namespace deep_ep {
namespace {

void check(cudaError_t result, const char* call, int device) {
  if (result == cudaSuccess) return;
  cudaGetLastError();
  fail<SystemError>("bootstrap over NCCL: {} on GPU {} failed: {} ({})", call, device, cudaGetErrorString(result),
                    cudaGetErrorName(result));
}

void check(ncclResult_t result, const char* call, ncclComm_t communicator) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  const char* detail = ncclGetLastError(communicator);
  fail<SystemError>("bootstrap over NCCL: {} failed: {} {}", call, ncclGetErrorString(result),
                    detail != nullptr ? detail : "");
}

/// Sets the rank's device for the calling thread, and puts back what was there. A runtime call of a thread that has set
/// none would make a context on the first GPU.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice", device);
    if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice", device);
    changed_ = before_ != device;
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

class NcclTransport {
 public:
  static constexpr const char* name = "NCCL";

  explicit NcclTransport(ncclComm_t communicator) : communicator_(communicator) {
    check(ncclCommUserRank(communicator_, &rank_), "ncclCommUserRank", communicator_);
    check(ncclCommCount(communicator_, &size_), "ncclCommCount", communicator_);
    check(ncclCommCuDevice(communicator_, &device_), "ncclCommCuDevice", communicator_);
    const CurrentDevice current(device_);
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags", device_);
  }
  ~NcclTransport() {
    try {
      const CurrentDevice current(device_);
      cudaStreamDestroy(stream_);
      cudaFree(staging_);
    } catch (const Error&) {
      // The driver is gone, and with it both.
    }
  }
  NcclTransport(const NcclTransport&) = delete;
  NcclTransport& operator=(const NcclTransport&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  void start(std::span<const std::byte> mine, std::size_t bytes) {
    const CurrentDevice current(device_);
    reserve(bytes + mine.size());
    std::byte* send = staging_ + bytes;
    check(cudaMemcpyAsync(send, mine.data(), mine.size(), cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync", device_);
    check(ncclAllGather(send, staging_, mine.size(), ncclUint8, communicator_, stream_), "ncclAllGather",
          communicator_);
  }
  bool done() const {
    const CurrentDevice current(device_);
    ncclResult_t state = ncclSuccess;
    check(ncclCommGetAsyncError(communicator_, &state), "ncclCommGetAsyncError", communicator_);
    check(state, "ncclAllGather", communicator_);
    if (state == ncclInProgress) return false;  // the stream may not hold all of it yet
    const cudaError_t done = cudaStreamQuery(stream_);
    if (done == cudaSuccess) return true;
    if (done != cudaErrorNotReady) check(done, "cudaStreamQuery", device_);
    cudaGetLastError();  // "not ready" is remembered as an error
    return false;
  }
  void take(std::span<std::byte> all) const {
    const CurrentDevice current(device_);
    check(cudaMemcpyAsync(all.data(), staging_, all.size(), cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync",
          device_);
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize", device_);
  }

 private:
  void reserve(std::size_t bytes) {
    if (bytes <= staging_bytes_) return;
    check(cudaFree(std::exchange(staging_, nullptr)), "cudaFree", device_);
    staging_bytes_ = 0;
    const std::size_t wanted = std::max<std::size_t>(bytes, 64 * 1024);
    check(cudaMalloc(reinterpret_cast<void**>(&staging_), wanted), "cudaMalloc", device_);
    staging_bytes_ = wanted;
  }

  ncclComm_t communicator_;
  int device_ = 0;
  int rank_ = 0;
  int size_ = 1;
  cudaStream_t stream_ = nullptr;
  std::byte* staging_ = nullptr;  ///< device memory
  std::size_t staging_bytes_ = 0;
};

}  // namespace

std::shared_ptr<Bootstrap> make_nccl_bootstrap(void* communicator, std::optional<double> timeout_s) {
  if (communicator == nullptr) throw InvalidArgument("communicator is null; an ncclComm_t is needed");
  return make_polled_bootstrap(std::make_unique<NcclTransport>(static_cast<ncclComm_t>(communicator)),
                               timeout_in_effect(timeout_s));
}

}  // namespace deep_ep
