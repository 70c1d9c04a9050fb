// Faults that kernels have met: on record for the host to raise, and whether the buffer can go on.
#pragma once

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "csrc/buffer/call_scope.hpp"
#include "csrc/buffer/low_latency/call_shape.hpp"
#include "csrc/control/membership.hpp"
#include "deep_ep/error.hpp"
#include "kernels/common/faults.hpp"

namespace deep_ep {

/// The time-out as waits of kernels take it. 0: they last for ever.
constexpr std::uint64_t timeout_ns(double timeout_s) {
  return static_cast<std::uint64_t>(std::min(timeout_s, 1e9) * 1e9);
}

/// Whether ranks no longer agree on how far they got. Not if counts differ, which all ranks compare before any row
/// moves, nor after a note.
constexpr bool breaks(const FaultRecord& fault) {
  const bool note = fault.kind == FaultKind::overflow && fault.wanted != Wanted::low_latency_dispatch_rows;
  return !note && !(fault.kind == FaultKind::mismatch && fault.wanted == Wanted::counts);
}

/// A fault either concerns a single call, or breaks the buffer, and every later call throws.
class Faults {
 public:
  /// With a control plane, which has `words`, kernels report their waits to it and obey its verdicts: without `masking`
  /// waits for lost ranks end their calls, with it low-latency calls go on without them. `explain` adds to the text of
  /// a TimeoutError: it is called once, when all calls have ended.
  Faults(
      const CallContext& calls, int rank, int num_ranks, double timeout_s, std::shared_ptr<ControlWords> words,
      std::shared_ptr<const control::Membership> membership, bool masking,
      std::function<std::string()> explain = [] { return std::string(); });

  /// For kernels: where they put faults on record, how long they wait, and which abort word ends their waits.
  WaitContext wait_context(bool low_latency = false) const;

  /// In device memory; null without a control plane.
  ControlState* control() const { return control_.get(); }

  /// Throws what a kernel has met since the last look, or what broke the buffer. Cheap when there is nothing.
  void raise();
  /// Before low_latency_resume, while no call is under way: throws like raise(), except where the others have masked
  /// this rank. It comes back with them.
  void come_back();
  /// Behind it: kernels forget what they have heard of the control plane, and what the program has masked.
  void forget_verdicts() const;
  /// Has a call ended early since the last look? (Notes do not count.)
  bool met() const;
  /// Is the buffer broken, even if only by a fault that nobody has raised yet?
  bool broken() const;
  /// The others have masked this rank, and it has not come back.
  bool given_up() const;
  /// Breaks the buffer: every later call throws E.
  template <class E>
  void break_later_calls(const std::string& why) {
    broken_ = std::make_exception_ptr(E(why));
    tell_end();
  }
  /// Breaks the buffer: this and every later call throws E.
  template <class E>
  [[noreturn]] void break_by(const std::string& why) {
    break_later_calls<E>(why);
    std::rethrow_exception(broken_);
  }
  /// The caller does not want to wait any longer: kernels leave their waits, and this and every later call throws. On
  /// the CPU they have ended then: the caller's tensors may go away.
  [[noreturn]] void break_by_interruption();
  /// A call has failed on this rank after other ranks had begun to exchange it: they hear that its rest does not come,
  /// its kernels leave their waits as above, and every later call throws.
  void break_begun_call();
  /// The failure of the queue pairs to `peer`, or for this rank itself of its first ones that failed; empty: none. With
  /// a control plane.
  std::string describe_failure(int peer) const;
  LowLatencyCallShapes& shapes() { return shapes_; }

 private:
  [[noreturn]] void raise(FaultRecord& fault);
  [[noreturn]] void raise_timeout(const FaultRecord& fault);
  void set_abort_words(std::uint64_t value, std::size_t words = 2) const;
  /// The control thread tells the other ranks that this one has ended its calls by an error of its own, unless a kernel
  /// has said why they have ended.
  void tell_end() const;
  void end_kernels() const;
  /// Because of which other rank nothing comes of `waited_for`, which has been waited for in vain: the verdict, for
  /// which this waits a little.
  std::optional<int> find_lost(int waited_for) const;

  const CallContext& calls_;
  int rank_, num_ranks_;
  double timeout_s_;
  static constexpr std::size_t kRecords = 2;
  /// Pinned: [0] a fault that ended a call, [1] a note that none had to end for.
  std::shared_ptr<FaultRecord> records_;
  std::shared_ptr<std::uint64_t> abort_;  ///< device memory, see WaitContext: of normal mode, of low-latency calls
  std::shared_ptr<ControlWords> words_;   ///< pinned; null without a control plane, as the two that follow
  std::shared_ptr<const control::Membership> membership_;
  std::shared_ptr<ControlState> control_;  ///< device memory
  ControlState initial_{};                 ///< what was there first
  std::function<std::string()> explain_;
  LowLatencyCallShapes shapes_;
  std::exception_ptr broken_;  ///< what every later call throws; null: the buffer is not broken
};

// Fault records in words: fault_texts.cpp.

/// The message of an exception for a fault or a note that kernels of `rank` have met. `lost`: of a time-out, whom the
/// rank that was waited for waits for itself, if it does. `why`: the wait ended before, as nothing comes of `lost`.
std::string describe_fault(const FaultRecord& fault, int rank, double timeout_s, std::optional<int> lost = {},
                           const std::string& why = {});
/// The same for a low-latency dispatch that ranks mean in different ways. `difference`: in what; empty: in one of all.
std::string describe_mismatch(const FaultRecord& fault, int rank, const std::string& difference);

/// The message of an exception: with masking, the others go on without `rank`. `lost`: all verdicts.
std::string describe_given_up(std::span<const control::LostRank> lost, int rank);

/// A line for the log: why a rank is masked. `gone`: that its process ended.
std::string describe_masking(const control::LostRank& lost, const std::string& gone);

}  // namespace deep_ep
