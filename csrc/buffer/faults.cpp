#include "csrc/buffer/faults.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

#include "csrc/memory/executor_memory.hpp"
#include "csrc/rdma/ring/failure.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/interrupt.hpp"

namespace deep_ep {
namespace {

bool written(const FaultRecord& record) { return __atomic_load_n(&record.written, __ATOMIC_ACQUIRE) != 0; }

}  // namespace

Faults::Faults(const CallContext& calls, int rank, int num_ranks, double timeout_s, std::shared_ptr<ControlWords> words,
               std::shared_ptr<const control::Membership> membership, bool masking,
               std::function<std::string()> explain)
    : calls_(calls),
      rank_(rank),
      num_ranks_(num_ranks),
      timeout_s_(timeout_s),
      records_(pinned_memory<FaultRecord>(calls.executor, kRecords * sizeof(FaultRecord))),
      abort_(device_copy<std::uint64_t>(calls.executor, {0, 0})),
      words_(std::move(words)),
      membership_(std::move(membership)),
      explain_(std::move(explain)) {
  if (words_ == nullptr) return;
  initial_.words = words_.get();
  initial_.rank = rank;
  initial_.num_ranks = num_ranks;
  initial_.masking = masking ? 1 : 0;
  initial_.step_ns = timeout_s == 0 ? ~std::uint64_t{0} : timeout_ns(timeout_s) / 4;
  control_ = device_memory<ControlState>(calls.executor);
  forget_verdicts();
}

WaitContext Faults::wait_context(bool low_latency) const {
  // The verdict comes at the deadline and names the rank at the end of the chain; a wait that hears of none ends later.
  const std::uint64_t timeout = timeout_ns(timeout_s_);
  const std::uint64_t for_the_verdict = control_ == nullptr ? 0 : timeout / 4;
  return WaitContext{records_.get(), abort_.get() + (low_latency ? 1 : 0), timeout + for_the_verdict, control_.get()};
}

void Faults::forget_verdicts() const { copy_now(*calls_.executor, control_.get(), &initial_, sizeof initial_); }

bool Faults::met() const { return written(records_.get()[0]) || given_up(); }

bool Faults::given_up() const {
  if (initial_.masking == 0) return false;
  return control::lost_for(*words_, rank_) != control::kNobody;
}

bool Faults::broken() const {
  const FaultRecord& fault = records_.get()[0];
  return broken_ != nullptr || (written(fault) && breaks(fault));
}

void Faults::set_abort_words(std::uint64_t value, std::size_t words) const {
  const std::uint64_t values[] = {value, value};
  copy_now(*calls_.executor, abort_.get(), values, words * sizeof value);
}

void Faults::tell_end() const {
  if (words_ == nullptr) return;
  std::uint32_t none = 0;
  __atomic_compare_exchange_n(&words_->ended, &none, static_cast<std::uint32_t>(rank_) + 1, false, __ATOMIC_RELEASE,
                              __ATOMIC_RELAXED);
}

void Faults::break_by_interruption() {
  break_later_calls<Interrupted>(fmt::format(
      "rank {}: a call was interrupted while it waited. The ranks no longer agree: destroy the buffer", rank_));
  end_kernels();
  std::rethrow_exception(broken_);
}

void Faults::break_begun_call() {
  if (broken_ != nullptr) return;
  break_later_calls<Error>(fmt::format(
      "rank {}: an earlier call failed after other ranks had begun it, and its own error says why. The ranks no longer "
      "agree: destroy the buffer",
      rank_));
  end_kernels();
}

void Faults::end_kernels() const {
  if (calls_.executor->device().kind == Device::Kind::cpu) {
    for (const int mode : {0, 1}) __atomic_store_n(abort_.get() + mode, std::uint64_t{1}, __ATOMIC_RELEASE);
    const InterruptScope ends_anyway([] { return false; });
    calls_.settle();
  } else {
    set_abort_words(1);
  }
}

std::optional<int> Faults::find_lost(int waited_for) const {
  if (membership_ == nullptr || waited_for == rank_) return {};
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::min(timeout_s_ / 4, 1.0));
  for (;;) {
    const int lost = control::lost_for(*words_, waited_for);
    if (lost != control::kNobody && lost != rank_) return lost;
    if (lost == control::kNobody && membership_->has_left(waited_for)) return waited_for;
    if (lost == rank_ || std::chrono::steady_clock::now() > until) return {};
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::string Faults::describe_failure(int peer) const {
  for (int other = 0; other < initial_.num_ranks; ++other) {
    const std::uint32_t failed = __atomic_load_n(&words_->failed[other], __ATOMIC_ACQUIRE);
    if (failed == 0 || (peer != other && peer != rank_)) continue;
    FaultRecord record{};
    record.peer = other;
    record.field = static_cast<std::int32_t>(failed - 1);
    return rdma::describe_fault(rank_, record);
  }
  return {};
}

void Faults::come_back() {
  if (broken() || !given_up()) return raise();
  set_abort_words(0);
}

void Faults::raise() {
  if (broken_ != nullptr) std::rethrow_exception(broken_);
  FaultRecord& fault = records_.get()[0];
  FaultRecord& note = records_.get()[1];
  const bool ended = written(fault), masked = given_up();
  if (!ended && !masked && !written(note)) return;
  calls_.settle();  // threads of the kernels may still want to write a record, or look at the abort word
  if (ended) raise(fault);
  if (masked) throw TimeoutError(describe_given_up(membership_->lost(), rank_));  // until come_back()
  throw OutOfMemory(describe_fault(std::exchange(note, {}), rank_, timeout_s_));
}

void Faults::raise(FaultRecord& fault) {
  if (fault.kind == FaultKind::timeout) raise_timeout(fault);
  const bool of_dispatch = fault.wanted == Wanted::low_latency_dispatch_counts && fault.kind == FaultKind::mismatch;
  const auto hash = [](std::uint64_t word) { return static_cast<std::uint32_t>(word); };
  const std::string text =
      of_dispatch
          ? describe_mismatch(fault, rank_,
                              shapes_.difference(hash(fault.expected), hash(fault.seen), rank_, fault.peer, num_ranks_))
          : describe_fault(fault, rank_, timeout_s_);
  if (fault.kind == FaultKind::rdma_failed) break_by<SystemError>(text);
  if (fault.kind == FaultKind::overflow) break_by<OutOfMemory>(text);
  if (breaks(fault)) break_by<RankMismatch>(text);
  // Only normal mode's: where the others have masked this rank, that of low-latency calls stays until it comes back.
  set_abort_words(0, 1);
  fault = FaultRecord{};
  throw RankMismatch(text);
}

void Faults::raise_timeout(const FaultRecord& fault) {
  const std::optional<int> lost = find_lost(fault.peer);
  const std::vector<int> gone = membership_ == nullptr ? std::vector<int>() : membership_->gone();
  std::string why;
  if (lost && membership_->ended_by_error(*lost)) {
    why = fmt::format("rank {} has ended the call, and its own error says why", *lost);
    break_by<RankMismatch>(describe_fault(fault, rank_, timeout_s_, lost, why));
  }
  const bool has_gone = lost && std::ranges::find(gone, *lost) != gone.end();
  if (has_gone) {
    why = membership_->describe_end(*lost);
  } else if (lost && membership_->has_left(*lost)) {
    why = fmt::format("rank {} has left the buffer", *lost);
  }
  const std::string text = describe_fault(fault, rank_, timeout_s_, lost, why);
  // The rank waited for may itself wait for what was lost by a queue pair of this rank. With masking calls go on
  // without the peer, and a process that has ended, or left, takes its queue pairs along.
  const bool explains = words_ != nullptr && initial_.masking == 0 && gone.empty() && why.empty();
  const std::string failure = explains ? describe_failure(rank_) : std::string();
  if (!failure.empty()) break_by<SystemError>(failure + "; " + text);
  std::string more = explain_();
  if (more.empty() && membership_ != nullptr && !has_gone)
    more = membership_->describe_missing_call(lost.value_or(fault.peer));
  break_by<TimeoutError>(more.empty() ? text : text + ". " + more);
}

}  // namespace deep_ep
