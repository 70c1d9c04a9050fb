// Ranks that already talk through NCCL, or can: one GPU per rank.
//
// No call of NCCL counts as done before ncclCommGetAsyncError says so: communicators may be non-blocking, and a peer
// that died shows up only there. Waits are polls with a deadline; what may still be written to after one that failed is
// left alone, not freed.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
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
  // From a unique id: the communicator is ours.
  NcclGroup(const ncclUniqueId& id, int rank, int size, double timeout_s)
      : timeout_s_(timeout_s), owned_(true), rank_(rank), size_(size) {
    check(cudaGetDevice(&device_), "cudaGetDevice", -1);
    // cudaGetDevice alone does not create the context that NCCL needs.
    check(cudaSetDevice(device_), "cudaSetDevice", device_);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const ncclResult_t result = ncclCommInitRankConfig(&communicator_, size, id, rank, &config);
    try {
      settle(result, "ncclCommInitRankConfig", Deadline(timeout_s_));
      create_stream();
    } catch (...) {
      broken_ = true;
      close();
      throw;
    }
  }

  // From a communicator of the caller.
  NcclGroup(ncclComm_t communicator, double timeout_s)
      : timeout_s_(timeout_s), communicator_(communicator), owned_(false) {
    check(ncclCommUserRank(communicator_, &rank_), "ncclCommUserRank");
    check(ncclCommCount(communicator_, &size_), "ncclCommCount");
    check(ncclCommCuDevice(communicator_, &device_), "ncclCommCuDevice");
    const CurrentDevice current(device_);
    create_stream();
  }

  ~NcclGroup() {
    try {
      const CurrentDevice current(device_);
      close();
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
    const Deadline deadline(timeout_s_);
    reserve(all.size() + mine.size());
    std::byte* send = staging_ + all.size();
    // Anything that fails from here on leaves work in flight on the stream.
    broken_ = true;
    check(cudaMemcpyAsync(send, mine.data(), mine.size(), cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync", device_);
    settle(ncclAllGather(send, staging_, mine.size(), ncclUint8, communicator_, stream_), "ncclAllGather", deadline);
    await_stream(deadline);
    check(cudaMemcpyAsync(all.data(), staging_, all.size(), cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync",
          device_);
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize", device_);
    broken_ = false;
  }

 private:
  void create_stream() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags", device_);
  }

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

  // Waits until the communicator has done what a call started.
  void settle(ncclResult_t result, const char* call, const Deadline& deadline) {
    if (result != ncclSuccess && result != ncclInProgress) fail_nccl(result, call, communicator_);
    for (;;) {
      ncclResult_t state = ncclSuccess;
      check(ncclCommGetAsyncError(communicator_, &state), "ncclCommGetAsyncError");
      if (state == ncclSuccess) return;
      if (state != ncclInProgress) fail_nccl(state, call, communicator_);
      if (deadline.expired()) give_up(call);
      std::this_thread::sleep_for(kNap);
    }
  }

  void await_stream(const Deadline& deadline) {
    for (;;) {
      const cudaError_t result = cudaStreamQuery(stream_);
      if (result == cudaSuccess) return;
      if (result != cudaErrorNotReady) check(result, "cudaStreamQuery", device_);
      cudaGetLastError();  // "not ready" is remembered as an error
      ncclResult_t state = ncclSuccess;
      check(ncclCommGetAsyncError(communicator_, &state), "ncclCommGetAsyncError");
      if (state != ncclSuccess && state != ncclInProgress) fail_nccl(state, "ncclAllGather", communicator_);
      if (deadline.expired()) give_up("ncclAllGather");
      std::this_thread::sleep_for(kNap);
    }
  }

  [[noreturn]] void give_up(const char* call) {
    broken_ = true;
    fail<TimeoutError>("bootstrap over NCCL: rank {} of {} waited {} s in {} for the other ranks", rank_, size_,
                       timeout_s_, call);
  }

  void close() noexcept {
    if (owned_ && communicator_ != nullptr) {
      if (!broken_) finalize();
      // Aborting also stops a kernel that waits for a rank that never came, so that the stream can be destroyed.
      broken_ ? ncclCommAbort(communicator_) : ncclCommDestroy(communicator_);
      communicator_ = nullptr;
    } else if (broken_) {
      return;  // the caller's communicator may still use stream and staging
    }
    if (stream_ != nullptr) cudaStreamDestroy(std::exchange(stream_, nullptr));
    if (staging_ != nullptr) cudaFree(std::exchange(staging_, nullptr));
  }

  // Lets peers finish reading what this rank sent; aborting right away would free it under them.
  void finalize() noexcept {
    try {
      settle(ncclCommFinalize(communicator_), "ncclCommFinalize", Deadline(timeout_s_));
    } catch (const std::exception&) {
      broken_ = true;
    }
  }

  double timeout_s_;
  ncclComm_t communicator_ = nullptr;
  bool owned_;
  bool broken_ = false;
  int device_ = 0;
  int rank_ = 0;
  int size_ = 1;
  cudaStream_t stream_ = nullptr;
  std::byte* staging_ = nullptr;
  std::size_t staging_bytes_ = 0;
};

std::shared_ptr<Bootstrap> bootstrap_of(const std::shared_ptr<NcclGroup>& group) {
  return make_callback_bootstrap(
      group->rank(), group->size(),
      [group](std::span<const std::byte> mine, std::span<std::byte> all) { group->all_gather(mine, all); });
}

}  // namespace

std::shared_ptr<Bootstrap> make_nccl_bootstrap(std::span<const std::byte> unique_id, int rank, int size,
                                               std::optional<double> timeout_s) {
  require_rank(rank, size);
  ncclUniqueId id;
  if (unique_id.size() != sizeof(id)) {
    fail<InvalidArgument>("unique_id has {} bytes, allowed: {}", unique_id.size(), sizeof(id));
  }
  std::memcpy(&id, unique_id.data(), sizeof(id));
  return bootstrap_of(std::make_shared<NcclGroup>(id, rank, size, timeout_in_effect(timeout_s)));
}

std::shared_ptr<Bootstrap> make_nccl_bootstrap(void* communicator, std::optional<double> timeout_s) {
  if (communicator == nullptr) throw InvalidArgument("communicator is null; an ncclComm_t is needed");
  return bootstrap_of(std::make_shared<NcclGroup>(static_cast<ncclComm_t>(communicator), timeout_in_effect(timeout_s)));
}

std::vector<std::byte> make_nccl_unique_id() {
  ncclUniqueId id;
  check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  std::vector<std::byte> bytes(sizeof(id));
  std::memcpy(bytes.data(), &id, sizeof(id));
  return bytes;
}

}  // namespace deep_ep
