#include "csrc/buffer/low_latency/rank_masks.hpp"

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/fault_texts.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep {

std::string why_own_masks(std::span<const MaskingRank> ranks) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (!ranks[rank].process.same_host(ranks[0].process)) {
      return fmt::format("rank {} is on another host than rank 0, and a host may be lost", rank);
    }
    if (!ranks[rank].reaches_board) {
      return fmt::format("rank {} is not known to have native atomics on the GPU of rank 0", rank);
    }
  }
  return {};
}

RankMasks::RankMasks(Runtime& runtime, const LowLatencyState* state)
    : runtime_(runtime),
      state_(state),
      mask_(runtime.zeroed_memory<std::int32_t>(bytes())),
      records_(pinned_memory<FaultRecord>(runtime.executor(),
                                          static_cast<std::size_t>(runtime.num_ranks()) * sizeof(FaultRecord))) {}

void RankMasks::log_new() const {
  for (int rank = 0; rank < runtime_.num_ranks(); ++rank) {
    FaultRecord& masked = records_.get()[rank];
    if (__atomic_load_n(&masked.written, __ATOMIC_ACQUIRE) == 0) continue;
    const FaultRecord record = masked;
    if (change_ && record.field == 0) continue;  // nobody has agreed to it: the call ends by that
    // A kernel under way may have more to report: it writes to the record after this, or not at all.
    __atomic_store_n(&masked.written, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&masked.claimed, 0, __ATOMIC_RELEASE);
    log::warn("{}", describe_masking(record, runtime_.rank(), runtime_.timeout_s()));
  }
}

void RankMasks::update(int rank, bool masked, StreamHandle stream) {
  check_range("rank", rank, 0, runtime_.num_ranks() - 1);
  if (change_) return change_(rank, masked, stream);
  CallScope scope(runtime_.calls(), {.stream = stream});
  runtime_.executor()->copy(mask() + rank, masked ? &state_->one : &state_->none, sizeof(std::int32_t), scope.stream());
  scope.finish();
}

void RankMasks::query(const TensorView& status, StreamHandle stream) {
  check_tensor("status", status, runtime_.device(), {DType::int32}, {runtime_.num_ranks()});
  CallScope scope(runtime_.calls(), {.stream = stream});
  runtime_.executor()->copy(status.data, mask(), bytes(), scope.stream());
  scope.finish();
}

void RankMasks::clear(StreamHandle stream) {
  if (change_) return change_(-1, false, stream);
  CallScope scope(runtime_.calls(), {.stream = stream});
  runtime_.executor()->fill(mask(), 0, bytes(), scope.stream());
  scope.finish();
}

void RankMasks::clear_now() {
  for (int rank = 0; rank < runtime_.num_ranks(); ++rank) records_.get()[rank] = {};
  runtime_.executor()->fill(mask(), 0, bytes(), runtime_.comm_stream());
  runtime_.executor()->synchronize(runtime_.comm_stream());
}

}  // namespace deep_ep
