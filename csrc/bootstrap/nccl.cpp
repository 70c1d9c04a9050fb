// Ranks that already talk through NCCL: one GPU per rank.
//
// No call of NCCL counts as done before ncclCommGetAsyncError says so: communicators may be non-blocking, and a peer
// that died shows up only there.
#include <nccl.h>

#include <algorithm>
#include <memory>

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
    stream_ = {executor_->create_stream(), [on = executor_](StreamHandle stream) { on->destroy_stream(stream); }};
  }

  void gather(std::span<const std::byte> mine, std::span<std::byte> all, const RankWait& wait) {
    if (const std::size_t wanted = all.size() + mine.size(); wanted > staging_bytes_) {
      const std::size_t bytes = std::max<std::size_t>(wanted, 64 * 1024);
      staging_ = {executor_->allocate(bytes), [on = executor_](void* memory) { on->free(memory); }};
      staging_bytes_ = bytes;
    }
    auto* const received = static_cast<std::byte*>(staging_.get());
    std::byte* const sent = received + all.size();
    const StreamHandle stream = stream_.get();
    executor_->copy(sent, mine.data(), mine.size(), stream);
    // NCCL makes the communicator's GPU current meanwhile.
    check(ncclAllGather(sent, received, mine.size(), ncclUint8, communicator_, static_cast<cudaStream_t>(stream)),
          "ncclAllGather", communicator_);
    const auto wait_until = [&](const auto& done) {
      wait.until([&] {
        ncclResult_t state = ncclSuccess;
        check(ncclCommGetAsyncError(communicator_, &state), "ncclCommGetAsyncError", communicator_);
        check(state, "ncclAllGather", communicator_);
        return state != ncclInProgress && done() ? "" : "the other ranks";
      });
    };
    wait_until([] { return true; });  // before, the stream may not hold all of it
    const EventHandle behind = executor_->record_event(stream);
    wait_until([&] { return executor_->event_done(behind); });
    executor_->copy(all.data(), received, all.size(), stream);
    executor_->synchronize(stream);
  }

 private:
  ncclComm_t communicator_;
  std::shared_ptr<Executor> executor_;
  std::shared_ptr<void> staging_, stream_;  ///< device memory; the stream ends first
  std::size_t staging_bytes_ = 0;
};

}  // namespace

std::shared_ptr<Bootstrap> make_nccl_bootstrap(void* communicator, std::optional<double> timeout_s) {
  if (communicator == nullptr) throw InvalidArgument("communicator is null; an ncclComm_t is needed");
  return make_polled_bootstrap(std::make_unique<NcclTransport>(static_cast<ncclComm_t>(communicator)),
                               timeout_in_effect(timeout_s));
}

}  // namespace deep_ep
