// Ranks that already talk through NCCL: one GPU per rank.
//
// No call of NCCL counts as done before ncclCommGetAsyncError says so: communicators may be non-blocking, and a peer
// that died shows up only there.
#include <nccl.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "csrc/bootstrap/polled.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep {
namespace {

void check(ncclResult_t result, const char* call, ncclComm_t communicator) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  const char* detail = ncclGetLastError(communicator);
  fail<SystemError>("bootstrap over NCCL: {} failed: {} {}", call, ncclGetErrorString(result),
                    detail != nullptr ? detail : "");
}

class NcclTransport {
 public:
  static constexpr const char* name = "NCCL";
  static constexpr bool kIsWrittenTo = true;
  int rank = 0, size = 1;

  explicit NcclTransport(ncclComm_t communicator) : communicator_(communicator) {
    check(ncclCommUserRank(communicator_, &rank), "ncclCommUserRank", communicator_);
    check(ncclCommCount(communicator_, &size), "ncclCommCount", communicator_);
    int device = 0;
    check(ncclCommCuDevice(communicator_, &device), "ncclCommCuDevice", communicator_);
    executor_ = make_cuda_executor(device);
    stream_ = executor_->create_stream();
  }
  ~NcclTransport() {
    executor_->destroy_stream(stream_);
    executor_->free(staging_);
  }
  NcclTransport(const NcclTransport&) = delete;
  NcclTransport& operator=(const NcclTransport&) = delete;

  void start(std::span<const std::byte> mine) {
    const std::size_t bytes = mine.size() * static_cast<std::size_t>(size);
    reserve(bytes + mine.size());
    std::byte* send = staging_ + bytes;
    executor_->copy(send, mine.data(), mine.size(), stream_);
    behind_ = nullptr;
    // NCCL makes the communicator's GPU current meanwhile.
    check(ncclAllGather(send, staging_, mine.size(), ncclUint8, communicator_, static_cast<cudaStream_t>(stream_)),
          "ncclAllGather", communicator_);
  }
  bool done(std::span<std::byte> all) {
    ncclResult_t state = ncclSuccess;
    check(ncclCommGetAsyncError(communicator_, &state), "ncclCommGetAsyncError", communicator_);
    check(state, "ncclAllGather", communicator_);
    if (state == ncclInProgress) return false;  // the stream may not hold all of it yet
    if (!behind_) behind_ = executor_->record_event(stream_);
    if (!executor_->event_done(behind_)) return false;
    executor_->copy(all.data(), staging_, all.size(), stream_);
    executor_->synchronize(stream_);
    return true;
  }
  static std::string awaited() { return "the other ranks"; }

 private:
  void reserve(std::size_t bytes) {
    if (bytes <= staging_bytes_) return;
    executor_->free(std::exchange(staging_, nullptr));
    staging_bytes_ = 0;
    const std::size_t wanted = std::max<std::size_t>(bytes, 64 * 1024);
    staging_ = static_cast<std::byte*>(executor_->allocate(wanted));
    staging_bytes_ = wanted;
  }

  ncclComm_t communicator_;
  std::shared_ptr<Executor> executor_;
  StreamHandle stream_ = nullptr;
  EventHandle behind_;            ///< what the all-gather under way has enqueued
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
