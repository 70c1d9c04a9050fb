#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/rdma/ring/cpu_handler.hpp"
#include "csrc/rdma/ring/wire.hpp"
#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep::rdma::verbs {
namespace {

/// Depth of the device's queues. A ring may be deeper: the wire takes what there is room for.
std::uint32_t send_depth(const Device& device, const ConnectionOptions& options) {
  constexpr std::uint32_t kLeast = 16;
  constexpr std::uint32_t kEnough = 512;  // more under way does not make a connection faster
  const auto most_completions = static_cast<std::uint32_t>(device.limits().max_cqe);
  const auto most_requests = static_cast<std::uint32_t>(device.limits().max_qp_wr);
  const auto pairs = static_cast<std::uint32_t>(options.ends());
  const std::uint32_t share = most_completions / pairs;
  if (share < kLeast || most_requests < kLeast) {
    fail<SystemError>(
        "RDMA device {}: {} queue pairs with {} requests each under way are too many for it (completion queues hold "
        "{}, send queues {})",
        device.name(), pairs, kLeast, most_completions, most_requests);
  }
  return std::min({options.depth, kEnough, share, most_requests});
}

/// The name that mlx5 devices give to a failed verbs completion. The argument is an ibv_wc_status.
Syndrome syndrome_of(int status) {
  constexpr std::pair<ibv_wc_status, Syndrome> kSyndromes[] = {
      {IBV_WC_SUCCESS, Syndrome::none},
      {IBV_WC_LOC_LEN_ERR, Syndrome::local_length},
      {IBV_WC_LOC_PROT_ERR, Syndrome::local_protection},
      {IBV_WC_WR_FLUSH_ERR, Syndrome::flushed},
      {IBV_WC_MW_BIND_ERR, Syndrome::memory_window_bind},
      {IBV_WC_BAD_RESP_ERR, Syndrome::bad_response},
      {IBV_WC_LOC_ACCESS_ERR, Syndrome::local_access},
      {IBV_WC_REM_INV_REQ_ERR, Syndrome::remote_invalid_request},
      {IBV_WC_REM_ACCESS_ERR, Syndrome::remote_access},
      {IBV_WC_REM_OP_ERR, Syndrome::remote_operation},
      {IBV_WC_RETRY_EXC_ERR, Syndrome::transport_retries_exceeded},
      {IBV_WC_RESP_TIMEOUT_ERR, Syndrome::transport_retries_exceeded},
      {IBV_WC_RNR_RETRY_EXC_ERR, Syndrome::receiver_not_ready_retries_exceeded},
      {IBV_WC_REM_ABORT_ERR, Syndrome::remote_aborted},
  };
  for (const auto& [code, syndrome] : kSyndromes) {
    if (code == status) return syndrome;
  }
  // Local queue pair errors, and what has no code of its own (fatal, general).
  return Syndrome::local_queue_pair;
}

/// The wire of their handler, by plain ibv_post_send and ibv_poll_cq.
///
/// The device reports only requests that ask for it, and frees their room only then: so besides those that the handler
/// wants reported, some ask in every quarter of the queue.
class VerbsEnds final : public NicEnds, public Wire {
 public:
  VerbsEnds(const NicAccess& nic, const std::shared_ptr<Executor>& executor, const ConnectionOptions& options)
      : NicEnds(nic, options),
        depth_(send_depth(device(), options)),
        // An overrun completion queue loses completions, so every request under way has its place in it.
        completion_queue_(device().make_completion_queue(static_cast<std::uint32_t>(options.ends()) * depth_)),
        handler_(*this, device_) {
    while (queues_.size() < options.ends())
      queues_.push_back({.pair = QueuePair(nic.device, completion_queue_.get(), depth_)});
    rings_.emplace(executor, options.rings());
  }

  QueuePairAddress address(std::size_t end) const override { return queues_[end].pair.address(); }

  RdmaQueuePair connect(std::size_t end, const QueuePairAddress& peer) override {
    queues_[end].pair.connect(peer, options_.hasty);
    const RdmaQueuePair params = params_of(end, queues_[end].pair.number(), device().local_key(), peer);
    handler_.add(params);
    return params;
  }

  /// 0 is added to the first word of the peer's heap.
  void reach(std::size_t end, const QueuePairAddress& peer) override {
    const Operation operation{.opcode = device::rdma::kOpcodeFetchAdd,
                              .signalled = true,
                              .length = sizeof(std::uint64_t),
                              .local = {options_.sink, device().local_key()},
                              .remote = {0, peer.signal_key}};
    post(end, {&operation, 1});
    const Deadline deadline(5);
    std::array<WireCompletion, 1> answer;
    while (poll(answer) == 0) {
      if (deadline.expired()) {
        fail<SystemError>("RDMA device {}: a message that tries a path is not complete within {} s", device_,
                          deadline.seconds());
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    if (answer[0].syndrome == Syndrome::none) return;
    fail<SystemError>("RDMA device {}: a message that tries a path has failed: {}", device_, text(answer[0].syndrome));
  }

  void start() override { handler_.start(nic_.nic.nic.cpus, /*for_device=*/true); }

  std::string describe() const override {
    return fmt::format("handler cpu, wire verbs, NIC {}, heap registered as {}", device_, device().heap_path());
  }

  std::size_t depth() const override { return depth_; }

  /// SystemError for failures without a completion: a device that failed, a request that the provider refuses.
  void post(std::size_t ring, std::span<const Operation> operations) override {
    SendQueue& queue = queues_[ring];
    std::array<ibv_send_wr, kMostAtOnce> requests;
    std::array<ibv_sge, kMostAtOnce> pieces;
    for (std::size_t i = 0; i < operations.size(); ++i) {
      const Operation& operation = operations[i];
      ibv_send_wr& request = requests[i];
      request = {};
      request.wr_id = std::uint64_t{ring} << 32 | static_cast<std::uint32_t>(operation.index);
      request.next = i + 1 < operations.size() ? &requests[i + 1] : nullptr;
      // Verbs drop empty pieces, some providers refuse them.
      request.sg_list = operation.length > 0 ? &pieces[i] : nullptr;
      request.num_sge = operation.length > 0 ? 1 : 0;
      pieces[i] = {operation.local.address, operation.length, operation.local.key};
      if (operation.opcode == device::rdma::kOpcodeFetchAdd) {
        request.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
        request.wr.atomic = {.remote_addr = operation.remote.address,
                             .compare_add = operation.add,
                             .swap = 0,
                             .rkey = operation.remote.key};
      } else {
        request.opcode = IBV_WR_RDMA_WRITE;
        request.wr.rdma = {.remote_addr = operation.remote.address, .rkey = operation.remote.key};
      }
      if (operation.signalled || ++queue.since_reported >= std::max(depth_ / 4, 1U)) {
        request.send_flags |= IBV_SEND_SIGNALED;
        queue.since_reported = 0;
      }
    }

    ibv_send_wr* refused = nullptr;
    const int error = ibv_post_send(queue.pair.get(), requests.data(), &refused);
    if (error != 0) {
      device().require(error, fmt::format("ibv_post_send to queue pair {:#x}", queue.pair.number()));
    }
  }

  std::size_t poll(std::span<WireCompletion> completions) override {
    std::array<ibv_wc, 32> polled;
    const int count = ibv_poll_cq(completion_queue_.get(),
                                  static_cast<int>(std::min(polled.size(), completions.size())), polled.data());
    if (count < 0) fail<SystemError>("RDMA device {}: ibv_poll_cq gives {}", device().name(), count);
    if (count == 0 && device().has_failed()) {
      fail<SystemError>("RDMA device {} reported a fatal error: nothing on it completes any more", device().name());
    }
    for (int i = 0; i < count; ++i) {
      const ibv_wc& completion = polled[static_cast<std::size_t>(i)];
      const Syndrome syndrome = syndrome_of(completion.status);
      completions[static_cast<std::size_t>(i)] = {
          completion.wr_id >> 32, static_cast<std::uint32_t>(completion.wr_id), syndrome,
          syndrome == Syndrome::none ? std::uint8_t{0} : static_cast<std::uint8_t>(completion.vendor_err)};
    }
    return static_cast<std::size_t>(count);
  }

 private:
  struct SendQueue {
    QueuePair pair;
    std::uint32_t since_reported = 0;  ///< operations handed over since the last one that asked for a completion
  };

  std::string executor_failure() const override { return handler_.failure(); }
  Device& device() const { return *nic_.device; }

  std::uint32_t depth_;  ///< of each send queue
  std::shared_ptr<ibv_cq> completion_queue_;
  /// Of each ring, which is the upper half of a work request's id; the lower half is that of the operation's index.
  std::vector<SendQueue> queues_;
  CpuHandler handler_;  ///< last: its thread uses the rest
};

}  // namespace

std::unique_ptr<Ends> make_verbs_ends(const NicAccess& nic, const std::shared_ptr<Executor>& executor,
                                      const ConnectionOptions& options) {
  return std::make_unique<VerbsEnds>(nic, executor, options);
}

}  // namespace deep_ep::rdma::verbs
