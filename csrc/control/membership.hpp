// A rank's part of a buffer in the control plane: what is known of the other ranks, and the verdicts on them.
//
// Kernels say for whom they wait. A rank reports its waits to all others, so each knows who waits for whom; the lowest
// rank that is neither lost nor silent decides. A thread that hears of a verdict tells all others before it tells its
// own kernels: so all ranks that go on hear of it, or none does, though the rank that decided may end half way.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "csrc/control/messages.hpp"
#include "csrc/control/plane.hpp"
#include "deep_ep/bootstrap.hpp"
#include "kernels/common/control_words.hpp"

namespace deep_ep::control {

/// By the words of this rank: the rank because of which nothing comes from `rank` any more; kNobody: something may
/// come. With masks each lost rank itself.
inline int lost_for(const ControlWords& words, int rank) {
  return static_cast<int>(__atomic_load_n(&words.lost[rank], __ATOMIC_ACQUIRE)) - 1;
}

struct JoinOptions {
  double timeout_s = 0;  ///< of waits; 0: they last for ever
  bool masks = false;    ///< ranks go on without those that are lost
  bool by_tcp = false;   ///< the ranks are not all of one network namespace
};

class Membership {
 public:
  /// Collective. Null where the control plane is off on some rank; with masks that is an InvalidArgument on all.
  /// `words`, which waits of the rank read and write, live as long as the membership.
  static std::unique_ptr<Membership> join(const std::shared_ptr<Plane>& plane, Bootstrap& bootstrap,
                                          ControlWords& words, const JoinOptions& options = {});
  /// Returns when the processes of the other ranks and this one are connected.
  Membership(std::shared_ptr<Plane> plane, std::uint64_t buffer, int rank, std::span<const ProcessInfo> ranks,
             ControlWords& words, const JoinOptions& options = {});
  /// Says goodbye: Goodbye::ended.
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  /// Has it ended its calls by an error that it has found, so not by a wait?
  bool ended_by_error(int rank) const;
  /// The verdicts, in the order in which they were given or heard.
  std::vector<LostRank> lost() const;
  /// The ranks whose processes have ended, as far as this rank has seen or heard.
  std::vector<int> gone() const;
  /// "the process of rank 3 has ended (process 77 on node-a)"
  std::string describe_end(int rank) const;
  /// True if `rank` has said goodbye, in any way.
  bool has_left(int rank) const;
  /// Says goodbye. Waits for this rank, in calls that it has not made, end.
  void leave(Goodbye goodbye);
  /// "rank 3 has left the buffer", of a rank that takes part in no further exchange; empty: all do.
  std::string describe_leaver() const;
  /// Of a rank that has made fewer calls than this one, as far as it has said: that it has not made this one. Else
  /// empty.
  std::string describe_missing_call(int rank) const;

  // With masks.

  /// This rank's program leaves `rank` out from now on, or does so no longer. A wait of `rank` for this one says
  /// nothing about this one meanwhile.
  void leave_out(int rank, bool on);
  /// At the end of the buffer: says goodbye, and returns when all ranks that are not lost, nor left out by this rank's
  /// program, have done so. After `most_s` (0: for ever) a warning names those that have not.
  void meet(double most_s);
  std::vector<int> awaited_at_end() const;
  /// By all ranks, between two barriers of the bootstrap: forgets the verdicts so far.
  void resume();

  // A process that takes the place of a rank joins while the others replace that rank.

  /// Collective with join() in the new processes, which are all of this network namespace: all begin anew, as a buffer
  /// of another number. Kernels go on without the ranks that were lost, until resume().
  void replace(Bootstrap& bootstrap);
  /// "rank 3 (process 77 on node-a)"
  std::string describe_process(int rank) const;
  /// Waits, for a moment, until the process of `rank` is known to have ended, or to have left: true.
  bool await_end(int rank) const;

 private:
  friend class Plane;
  /// The time of a member. It moves on in steps of a part of the time-out at most, so that a process that stood still
  /// has not waited.
  using Time = std::chrono::nanoseconds;
  using Clock = Plane::Clock;
  /// The reports of this rank's kernels on their waits for one peer.
  struct OwnWait {
    std::uint32_t beats = 0;
    Time since{};
    Time longest{};  ///< of waits that last at the same time, as kernels say
    Time heard{};    ///< when that was said last
  };
  struct Rank {
    ProcessInfo info;
    const Plane::Peer* peer = nullptr;  ///< null: a rank of this process
    Report said = {};                   ///< the last; of this rank, what it says
    Time sign{};                        ///< when it has last reported a wait, or what it owes began
    int lost = kNobody;
    OwnWait own = {};  ///< of this rank for it
    Time heard{};      ///< its last report
  };

  int size() const { return static_cast<int>(ranks_.size()); }
  Rank& at(int rank) { return ranks_[index(rank)]; }
  const Rank& at(int rank) const { return ranks_[index(rank)]; }
  // All below with the plane's mutex held.
  const Report& report() const { return at(rank_).said; }
  void begin(std::uint64_t buffer, std::span<const ProcessInfo> ranks);
  void hear(const Token& process, const Report& said);
  void step(Clock::time_point now);
  const PeerReport& report(int rank, int peer) const { return at(rank).said.about(peer); }
  PeerReport& mine(int peer) { return at(rank_).said.about(peer); }
  std::uint64_t load_calls() const { return __atomic_load_n(&words_.calls, __ATOMIC_RELAXED); }
  bool has_gone(const Rank& rank) const;
  void say(bool waits = false);
  void look_at_words();
  void look_at_wait(OwnWait& wait, int peer) const;
  void judge();
  std::vector<LostRank> decide();
  void lose(const LostRank& verdict);
  void show();
  Evidence gather() const;

  const std::shared_ptr<Plane> plane_;
  const int rank_;
  ControlWords& words_;
  const bool masks_;
  const Time timeout_;
  std::vector<Rank> ranks_;
  Clock::time_point looked_;  ///< at waits
  Time time_{}, reported_{};
  bool is_awaited_ = false;  ///< another rank has reported a wait for this one
  // Of this round.
  std::vector<LostRank> verdicts_;
  Time blamed_since_{};  ///< a rank is about to be lost
};

}  // namespace deep_ep::control
