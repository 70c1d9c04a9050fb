#include "csrc/buffer/faults.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

#include "csrc/executor/own_stream.hpp"
#include "csrc/memory/executor_memory.hpp"
#include "csrc/rdma/ring/failure.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/interrupt.hpp"

namespace deep_ep {
namespace {

bool written(const FaultRecord& record) { return __atomic_load_n(&record.written, __ATOMIC_ACQUIRE) != 0; }

/// Counts are compared before any row moves, and by all ranks: they still agree on what has happened.
bool breaks(const FaultRecord& fault) {
  return fault.kind == FaultKind::timeout || fault.kind == FaultKind::rdma_failed ||
         fault.kind == FaultKind::overflow || (fault.kind == FaultKind::mismatch && fault.wanted != Wanted::counts);
}

}  // namespace

Faults::Faults(const CallContext& calls, const std::shared_ptr<Executor>& executor, int rank, int num_ranks,
               double timeout_s)
    : calls_(calls),
      rank_(rank),
      num_ranks_(num_ranks),
      timeout_s_(timeout_s),
      records_(pinned_memory<FaultRecord>(executor, kRecords * sizeof(FaultRecord))),
      abort_(device_memory<std::uint64_t>(executor)),
      abort_words_{abort_.get()} {
  executor->fill(abort_.get(), 0, sizeof *abort_, calls_.comm_stream());
  executor->synchronize(calls_.comm_stream());
}

WaitContext Faults::wait_context() const {
  // The verdict comes at the deadline and names the rank at the end of the chain; a wait that hears of none ends later.
  const std::uint64_t timeout = timeout_ns(timeout_s_);
  const std::uint64_t for_the_verdict = control_ == nullptr ? 0 : timeout / 4;
  return WaitContext{records_.get(), abort_.get(), timeout + for_the_verdict, control_.get()};
}

void Faults::obey(const std::shared_ptr<Executor>& executor, std::shared_ptr<const control::Membership> membership,
                  std::shared_ptr<ControlWords> words, bool masking) {
  membership_ = std::move(membership);
  words_ = std::move(words);
  initial_.words = words_.get();
  initial_.rank = rank_;
  initial_.num_ranks = num_ranks_;
  initial_.masking = masking ? 1 : 0;
  initial_.step_ns = timeout_s_ == 0 ? ~std::uint64_t{0} : timeout_ns(timeout_s_) / 4;
  control_ = device_memory<ControlState>(executor);
  forget_verdicts();
}

void Faults::forget_verdicts() const {
  Executor& executor = calls_.executor();
  executor.copy(control_.get(), &initial_, sizeof initial_, calls_.comm_stream());
  executor.synchronize(calls_.comm_stream());
}

bool Faults::met() const { return written(records_.get()[0]) || given_up(); }

bool Faults::given_up() const {
  if (initial_.masking == 0) return false;
  return __atomic_load_n(&words_->lost[rank_], __ATOMIC_ACQUIRE) != 0;
}

bool Faults::broken() const {
  const FaultRecord& fault = records_.get()[0];
  return broken_ != nullptr || (written(fault) && breaks(fault));
}

template <class E>
void Faults::break_by(const std::string& why) {
  broken_ = std::make_exception_ptr(E(why));
  std::rethrow_exception(broken_);
}
template void Faults::break_by<TimeoutError>(const std::string& why);

void Faults::break_by_interruption() {
  broken_ = std::make_exception_ptr(Interrupted(fmt::format(
      "rank {}: a call was interrupted while it waited. The ranks no longer agree: destroy the buffer", rank_)));
  end_waits();
  std::rethrow_exception(broken_);
}

void Faults::set_abort_words(std::uint8_t bytes, StreamHandle stream) const {
  Executor& executor = calls_.executor();
  for (std::uint64_t* abort : abort_words_) executor.fill(abort, bytes, sizeof *abort, stream);
  executor.synchronize(stream);
}

void Faults::end_waits() const {
  Executor& executor = calls_.executor();
  if (executor.device().kind == Device::Kind::cpu) {
    for (std::uint64_t* abort : abort_words_) __atomic_store_n(abort, std::uint64_t{1}, __ATOMIC_RELEASE);
    const InterruptScope ends_anyway([] { return false; });
    calls_.settle();
    return;
  }
  const OwnStream beside(executor);  // the kernel that waits is on the call's
  set_abort_words(1, beside.get());
}

int Faults::find_lost(int waited_for) const {
  if (membership_ == nullptr || waited_for == rank_) return control::kNobody;
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::min(timeout_s_ / 4, 1.0));
  for (;;) {
    const int lost = membership_->lost_for(waited_for);
    if (lost != control::kNobody || std::chrono::steady_clock::now() > until) return lost;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::string Faults::describe_waited(const FaultRecord& fault, int lost) const {
  if (lost == control::kNobody || lost == rank_) return describe_fault(fault, rank_, timeout_s_);
  const std::vector<int> gone = membership_->gone();
  if (std::ranges::find(gone, lost) == gone.end()) return describe_fault(fault, rank_, timeout_s_, lost);
  return describe_lost(fault, rank_, lost, membership_->describe_end(lost));
}

FaultRecord Faults::failed_queue_pair() const {
  FaultRecord record{};
  if (words_ == nullptr || initial_.masking != 0) return record;  // with masking calls go on without the peer
  if (membership_ != nullptr && !membership_->gone().empty()) return record;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    const std::uint32_t failed = __atomic_load_n(&words_->failed[peer], __ATOMIC_ACQUIRE);
    if (failed == 0) continue;
    record.kind = FaultKind::rdma_failed;
    record.peer = peer;
    record.field = static_cast<std::int32_t>(failed - 1);
    break;
  }
  return record;
}

void Faults::come_back() {
  if (broken() || !given_up()) return raise();
  set_abort_words(0, calls_.comm_stream());
}

void Faults::raise() {
  if (broken_ != nullptr) std::rethrow_exception(broken_);
  FaultRecord& fault = records_.get()[0];
  FaultRecord& note = records_.get()[1];
  if (given_up() && !written(fault)) {  // until come_back()
    calls_.settle();
    throw TimeoutError(describe_given_up(membership_->lost(), rank_));
  }
  if (written(fault)) {
    calls_.settle();  // other threads of the kernels may still want to write the record, or look at the abort word
    const int lost = fault.kind == FaultKind::timeout ? find_lost(fault.peer) : control::kNobody;
    if (membership_ != nullptr && membership_->ended_by_error(lost)) {
      break_by<RankMismatch>(describe_error_of(fault, rank_, lost));
    }
    const std::string text =
        fault.kind == FaultKind::timeout ? describe_waited(fault, lost) : describe_fault(fault, rank_, timeout_s_);
    const FaultRecord cause = fault.kind == FaultKind::timeout ? failed_queue_pair() : fault;
    if (cause.kind == FaultKind::rdma_failed) {
      // The wait may have been in vain for another reason.
      break_by<SystemError>(fault.kind == FaultKind::timeout ? rdma::describe_fault(rank_, cause) + "; " + text : text);
    }
    if (fault.kind == FaultKind::timeout) {
      const std::string more = explain_ ? explain_() : std::string();
      break_by<TimeoutError>(more.empty() ? text : text + ". " + more);
    }
    if (fault.kind == FaultKind::overflow) break_by<OutOfMemory>(text);
    if (breaks(fault)) break_by<RankMismatch>(text);
    Executor& executor = calls_.executor();
    executor.fill(abort_.get(), 0, sizeof *abort_, calls_.comm_stream());
    executor.synchronize(calls_.comm_stream());
    fault = FaultRecord{};
    throw RankMismatch(text);
  }
  if (!written(note)) return;
  calls_.settle();  // a kernel may be about to write another note
  const FaultRecord told = note;
  note = FaultRecord{};
  throw OutOfMemory(describe_fault(told, rank_, timeout_s_));
}

}  // namespace deep_ep
