#include "csrc/buffer/low_latency/rank_masks.hpp"

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/fault_texts.hpp"
#include "csrc/rdma/ring/failure.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep {

RankMasks::RankMasks(Runtime& runtime, const WaitContext& wait)
    : runtime_(runtime), wait_(wait), failures_logged_(static_cast<std::size_t>(runtime.num_ranks())) {}

void RankMasks::log_new() {
  const control::Membership& membership = *runtime_.membership();
  for (std::size_t peer = 0; peer < failures_logged_.size(); ++peer) {
    const std::uint32_t failed = __atomic_load_n(&runtime_.control_words().failed[peer], __ATOMIC_ACQUIRE);
    if (failed == 0 || failures_logged_[peer]) continue;
    failures_logged_[peer] = true;
    FaultRecord record{};
    record.kind = FaultKind::rdma_failed;
    record.peer = static_cast<std::int32_t>(peer);
    record.field = static_cast<std::int32_t>(failed - 1);
    log::warn("{}", rdma::describe_fault(runtime_.rank(), record));
  }
  if (__atomic_load_n(&runtime_.control_words().changes, __ATOMIC_ACQUIRE) == 0) return;
  const std::vector<control::LostRank> lost = membership.lost();
  for (; logged_ < lost.size(); ++logged_) {
    log::warn("{}", describe_masking(lost[logged_], membership.describe_end(lost[logged_].rank)));
  }
}

void RankMasks::launch(LowLatencyMasksStep step, int rank, std::int32_t* status, StreamHandle stream) {
  CallScope scope(runtime_.calls(), {.stream = stream});
  const LowLatencyMasksParams params{.wait = wait_, .step = step, .rank = rank, .status = status};
  runtime_.executor()->kernels().masks_low_latency(params, LaunchShape{1, 128, 0}, scope.stream());
  scope.finish();
}

void RankMasks::update(int rank, bool masked, StreamHandle stream) {
  check_range("rank", rank, 0, runtime_.num_ranks() - 1);
  if (!masked) runtime_.faults().raise();  // a rank that has been told that it is masked cannot undo that
  runtime_.membership()->leave_out(rank, masked);
  launch(masked ? LowLatencyMasksStep::mask : LowLatencyMasksStep::unmask, rank, nullptr, stream);
}

void RankMasks::query(const TensorView& status, StreamHandle stream) {
  check_tensor("status", status, runtime_.device(), {DType::int32}, {runtime_.num_ranks()});
  launch(LowLatencyMasksStep::query, -1, status.as<std::int32_t>(), stream);
}

void RankMasks::clear(StreamHandle stream) {
  runtime_.faults().raise();
  for (int rank = 0; rank < runtime_.num_ranks(); ++rank) runtime_.membership()->leave_out(rank, false);
  launch(LowLatencyMasksStep::unmask, -1, nullptr, stream);
}

void RankMasks::resume() {
  runtime_.membership()->resume();
  logged_ = 0;
  failures_logged_.assign(failures_logged_.size(), false);
}

}  // namespace deep_ep
