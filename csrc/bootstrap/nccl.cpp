// Ranks that already talk through NCCL: one GPU per rank.
//
// No call of NCCL counts as done before ncclCommGetAsyncError says so: communicators may be non-blocking, and a peer
// that died shows up only there. Waits are polls with a deadline; what may still be written to after one that failed is
// left alone, not freed.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

constexpr auto kNap = std::chrono::microseconds(100);

void check(cudaError_t result, const char* call, int device) {
  if (result == cudaSuccess) return;
  cudaGetLastError();
  fail<SystemError>("bootstrap over NCCL: {} on GPU {} failed: {} ({})", call, device, cudaGetErrorString(result),
                    cudaGetErrorName(result));
}

[[noreturn]] void fail_nccl(ncclResult_t result, const char* call, ncclComm_t communicator) {
  const char* detail = ncclGetLastError(communicator);
  fail<SystemError>("bootstrap over NCCL: {} failed: {} {}", call, ncclGetErrorString(result),
                    detail != nullptr ? detail : "");
}

void check(ncclResult_t result, const char* call) {
  if (result != ncclSuccess) fail_nccl(result, call, nullptr);
}

// Sets the rank's device for the calling thread and puts back what was there.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice", device);
    if (previous_ != device) check(cudaSetDevice(device), "cudaSetDevice", device);
    changed_ = previous_ != device;
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(previous_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

class NcclGroup {
 public:
  NcclGroup(ncclComm_t communicator, double timeout_s) : timeout_s_(timeout_s), communicator_(communicator) {
    check(ncclCommUserRank(communicator_, &rank_), "ncclCommUserRank");
    check(ncclCommCount(communicator_, &size_), "ncclCommCount");
    check(ncclCommCuDevice(communicator_, &device_), "ncclCommCuDevice");
    const CurrentDevice current(device_);
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags", device_);
  }

  ~NcclGroup() {
    if (broken_) return;  // the communicator may still use stream and staging
    try {
      const CurrentDevice current(device_);
      cudaStreamDestroy(stream_);
      if (staging_ != nullptr) cudaFree(staging_);
    } catch (...) {
      // The driver is gone, and with it everything here.
    }
  }

  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) {
    if (broken_) {
      fail<TimeoutError>("bootstrap over NCCL: rank {} of {} failed or gave up before; make a new one", rank_, size_);
    }
    const CurrentDevice current(device_);
    reserve(all.size() + mine.size());
    std::byte* send = staging_ + all.size();
    // Anything that fails from here on leaves work in flight on the stream.
    broken_ = true;
    check(cudaMemcpyAsync(send, mine.data(), mine.size(), cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync", device_);
    await(ncclAllGather(send, staging_, mine.size(), ncclUint8, communicator_, stream_), "ncclAllGather");
    check(cudaMemcpyAsync(all.data(), staging_, all.size(), cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync",
          device_);
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize", device_);
    broken_ = false;
  }

 private:
  void reserve(std::size_t bytes) {
    if (bytes <= staging_bytes_) return;
    if (staging_ != nullptr) check(cudaFree(std::exchange(staging_, nullptr)), "cudaFree", device_);
    staging_bytes_ = 0;
    const std::size_t wanted = std::max<std::size_t>(bytes, 64 * 1024);
    void* memory = nullptr;
    check(cudaMalloc(&memory, wanted), "cudaMalloc", device_);
    staging_ = static_cast<std::byte*>(memory);
    staging_bytes_ = wanted;
  }

  // Waits until the communicator has enqueued what a call started, and the stream has done it.
  void await(ncclResult_t result, const char* call) const {
    if (result != ncclSuccess && result != ncclInProgress) fail_nccl(result, call, communicator_);
    for (const Deadline deadline(timeout_s_);; std::this_thread::sleep_for(kNap)) {
      ncclResult_t state = ncclSuccess;
      check(ncclCommGetAsyncError(communicator_, &state), "ncclCommGetAsyncError");
      if (state != ncclSuccess && state != ncclInProgress) fail_nccl(state, call, communicator_);
      const cudaError_t done = state == ncclSuccess ? cudaStreamQuery(stream_) : cudaErrorNotReady;
      if (done == cudaSuccess) return;
      if (done != cudaErrorNotReady) check(done, "cudaStreamQuery", device_);
      cudaGetLastError();  // "not ready" is remembered as an error
      if (!deadline.expired()) continue;
      fail<TimeoutError>("bootstrap over NCCL: rank {} of {} waited {} s in {} for the other ranks", rank_, size_,
                         timeout_s_, call);
    }
  }

  double timeout_s_;
  ncclComm_t communicator_;
  bool broken_ = false;
  int device_ = 0;
  int rank_ = 0;
  int size_ = 1;
  cudaStream_t stream_ = nullptr;
  std::byte* staging_ = nullptr;
  std::size_t staging_bytes_ = 0;
};

}  // namespace

std::shared_ptr<Bootstrap> make_nccl_bootstrap(void* communicator, std::optional<double> timeout_s) {
  if (communicator == nullptr) throw InvalidArgument("communicator is null; an ncclComm_t is needed");
  const auto group = std::make_shared<NcclGroup>(static_cast<ncclComm_t>(communicator), timeout_in_effect(timeout_s));
  return make_callback_bootstrap(
      group->rank(), group->size(),
      [group](std::span<const std::byte> mine, std::span<std::byte> all) { group->all_gather(mine, all); });
}

}  // namespace deep_ep
