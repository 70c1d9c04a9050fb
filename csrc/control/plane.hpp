// The control plane of this process: one thread that knows which processes of the job have ended, and for which ranks
// others wait; it decides which ranks are lost, and tells the waits of kernels. It is connected to the control threads
// of the other processes, makes no CUDA call, and knows no kernels.
//
// A process has ended if its descriptor (pidfd) says so, or if its connection within the host ends: nothing else
// closes that. A connection between hosts may break for other reasons: it is made again. Only a process of the other
// host that has seen the end, or a port that refuses calls, says that the process has ended. Silence says nothing
// before a wait has lasted longer than the time-out.
//
// A rank that leaves a buffer says so, so that the end of its process is no loss for that buffer.
//
// With masks a verdict has two steps. The lowest rank that is neither lost nor silent decides. A thread that hears of a
// lost rank for the first time tells all others before it tells its own kernels: so all ranks that go on hear of it, or
// none does, though the rank that decided may end half way. A verdict stands until Membership::resume().
#pragma once

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/control/messages.hpp"
#include "csrc/control/sockets.hpp"
#include "csrc/control/verdict.hpp"
#include "csrc/memory/process_identity.hpp"
#include "csrc/support/home_process.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep::control {

struct Settings {
  bool on = true;            ///< DEEP_EP_CONTROL
  PortRange ports;           ///< DEEP_EP_CONTROL_PORTS
  bool unix_sockets = true;  ///< within a network namespace; tests switch them off
  double connect_s = 30;     ///< how long the processes of a buffer take at most to connect
};
Settings read_settings();

/// A process describes itself. Plain data, which travels through the bootstrap.
struct ProcessInfo {
  ProcessIdentity identity = {};
  Token process = {};  ///< random
  Token secret = {};   ///< a caller must show it
  std::uint64_t pid_namespace = 0;
  std::int32_t pid = 0;
  std::uint32_t on = 1;
  std::uint64_t buffer = 0;  ///< rank 0's names the buffer
  Addresses tcp = {};
};

/// Words of a buffer that its rank's waits read and write. They live as long as the membership. Spans are [ranks] or
/// longer, or empty: then waits report nothing.
struct Words {
  std::uint32_t* changes = nullptr;  ///< grows with each verdict; written last, with release order; 0: no rank is lost
  const std::uint32_t* ended = nullptr;  ///< a wait writes 1 + the rank because of which it ended
  /// [rank]: 0, or 1 + the rank because of which nothing comes from this one any more. Without masks that is the end of
  /// the chain of waits. With masks it is the lost rank itself; for this rank, the rank whose report decided.
  std::span<std::uint32_t> lost = {};
  std::span<const std::uint32_t> beats = {};   ///< [peer]: grows now and then while a wait for it lasts
  std::span<const std::uint64_t> waits = {};   ///< [peer]: for how long it had lasted then, in ns
  std::span<const std::uint32_t> wanted = {};  ///< [peer]: what it was for; a number that the caller understands
  std::span<std::uint32_t> failed = {};        ///< [peer]: not 0: a queue pair to it has failed
};

enum class LostWhy : std::uint32_t {
  unknown,
  gone,    ///< its process has ended
  silent,  ///< others have waited for it for longer than the time-out, and it has reported no wait of its own
  ended,   ///< it has ended its calls
  failed,  ///< it cannot be reached by RDMA
};
struct LostRank {
  int rank = 0;
  LostWhy why = LostWhy::unknown;
  int by = kNobody;          ///< the rank whose report decided
  std::uint32_t wanted = 0;  ///< silent: what that rank waited for ...
  double waited_s = 0;       ///< ... and for how long
};

struct JoinOptions {
  double timeout_s = 0;  ///< of waits; 0: they last for ever
  bool masks = false;    ///< ranks go on without those that are lost

  std::chrono::nanoseconds timeout() const {
    constexpr double kMostSeconds = 1e9;  // as in kernels; not all doubles have their nanoseconds in 64 bits
    const std::chrono::duration<double> seconds(std::min(timeout_s, kMostSeconds));
    return std::chrono::duration_cast<std::chrono::nanoseconds>(seconds);
  }
};

class Plane {
 public:
  using Clock = std::chrono::steady_clock;
  /// The one that buffers of this process share; it ends with the last of them.
  static std::shared_ptr<Plane> of_process();
  explicit Plane(const Settings& settings);
  ~Plane();
  Plane(const Plane&) = delete;
  Plane& operator=(const Plane&) = delete;

  /// Opens what others call: a Unix socket, and with `by_tcp` a TCP port. Not where it only `describes` this process.
  ProcessInfo info(bool by_tcp, bool describes = false);
  bool reaches_by_unix(const ProcessInfo& from, const ProcessInfo& to) const {
    return settings_.unix_sockets && from.identity.same_network(to.identity);
  }

  /// The number of the member. Returns when this process and the others are connected.
  int join(std::uint64_t buffer, int rank, const std::vector<ProcessInfo>& ranks, const Words& words,
           const JoinOptions& options = {});
  /// Says goodbye. If a TCP connection is down, waits until it is made again, for 5 s at most.
  void leave(int member);
  int lost_for(int member, int rank) const;  ///< as judge() says; with masks each lost rank itself
  std::vector<int> gone(int member) const;
  std::vector<LostRank> verdicts(int member) const;  ///< in the order in which they were heard
  void leave_out(int member, int rank, bool on);
  void arrive(int member);
  std::vector<int> awaited_at_end(int member) const;  ///< neither arrived, nor left, nor lost, nor left out
  void resume(int member);

 private:
  enum class Link : std::uint8_t { none, connecting, greeting, up };
  struct Peer {
    ProcessInfo info;
    int rank = 0;  ///< a rank of it, for messages
    bool by_unix = false;
    bool calls = false;  ///< we call it; otherwise it calls us
    UniqueFd process;    ///< pidfd
    UniqueFd socket;
    UniqueFd probe;          ///< TCP, where it calls us: whether its port can be reached from here
    bool reachable = false;  ///< it could: so a refused call means that the process has ended
    Link link = Link::none;
    bool was_up = false;
    Clock::time_point next{};  ///< attempt, or the end of this one
    std::size_t address = 0;   ///< of info.tcp
    int error = 0;             ///< of the last attempt
    int refusals = 0;          ///< in a row
    Clock::time_point refused_since{};
    std::vector<std::byte> received, unsent;
    bool ended = false;
    bool known = false;  ///< it has ended, and the data that it had sent has had time to arrive
    Clock::time_point ended_at{};
  };
  struct Caller {
    UniqueFd socket;
    Clock::time_point until{};
    Hello hello;
    std::size_t received = 0;
    bool by_unix = false;
    bool trusted = false;
  };
  /// The time of a member. It moves on in steps of a part of the time-out at most, so that a process that stood still
  /// has not waited.
  using MemberTime = std::chrono::nanoseconds;
  /// The reports of this rank's kernels on their waits for one peer.
  struct OwnWait {
    std::uint32_t beats = 0;
    bool lasts = false;
    MemberTime since{}, moved{};  ///< of beats
    MemberTime longest{};         ///< as kernels say
    MemberTime longest_at{};      ///< when that was heard of last
    int late_looks = 0;
    bool told_late = false;
    MemberTime lasted(MemberTime now) const { return std::min(longest, now - since); }
  };
  /// The report of a rank on its wait for another one.
  struct TheirWait {
    int rank = 0, peer = 0;
    bool late = false;
    std::uint32_t wanted = 0;
    MemberTime lasted{}, heard{};
  };
  struct Rank {
    Token process;
    bool left = false, arrived = false;
    RankFacts facts{};
    int lost = kNobody;  ///< as in Words
    OwnWait own{};       ///< of this rank for it
    MemberTime sign{};   ///< when it has last reported a wait
  };
  struct Member {
    int number = 0;
    std::uint64_t buffer = 0;
    int rank = 0;
    std::vector<Rank> ranks;
    Words words;
    JoinOptions options;
    std::vector<LostRank> verdicts;  ///< of ranks at the ends of chains
    bool told = false;               ///< that this rank has given up
    Clock::time_point since{};       ///< when a rank was lost first
    // Deadlines: see waits.cpp.
    std::uint32_t round = 0;  ///< see Message
    Clock::time_point looked{};
    MemberTime time{}, reported{};
    std::vector<TheirWait> waits;
    std::vector<RankPair> failed, left_out;  ///< left_out: the program of `rank` leaves `peer` out
    MemberTime failed_at{};                  ///< the first of them
    MemberTime blamed_since{};               ///< a rank is about to be lost
    std::vector<Message> early;              ///< of a later round

    int size() const { return static_cast<int>(ranks.size()); }
    Rank& at(int r) { return ranks[static_cast<std::size_t>(r)]; }
    const Rank& at(int r) const { return ranks[static_cast<std::size_t>(r)]; }
    bool has(const Token& process) const { return std::ranges::find(ranks, process, &Rank::process) != ranks.end(); }
    std::chrono::nanoseconds timeout() const { return options.timeout(); }
    /// Waits are looked at. Without deadlines and masks nothing follows from them.
    bool watches() const { return (options.timeout_s > 0 || options.masks) && !words.beats.empty(); }
  };
  using Peers = std::map<Token, Peer, bool (*)(const Token&, const Token&)>;
  friend struct Forks;

  void run();
  void start_thread();
  void wake() const;
  // All below with the mutex held.
  void close_descriptors();
  void step(Clock::time_point now);
  int next_step_ms(Clock::time_point now) const;
  void handle(std::span<const pollfd> polled);
  void call(Peer& peer, Clock::time_point now);
  void connected(Peer& peer, Clock::time_point now);
  void failed(Peer& peer, int error, Clock::time_point now);
  void probe(Peer& peer);
  void probed(Peer& peer);
  /// A process of this host that has been called answers when it comes to it; another call would look like its end.
  static bool has_no_limit(const Peer& peer) { return peer.by_unix && peer.link == Link::greeting; }
  void up(Peer& peer);
  void read(Peer& peer);
  void take(Peer& peer, std::span<const std::byte> bytes);
  void disconnected(Peer& peer);
  void has_ended(Peer& peer, bool seen_here);
  void accept_from(int listener, bool by_unix);
  bool read_hello(Caller& caller);
  bool attach(Caller& caller);
  void handle_message(const Peer& from, const Message& message);
  void apply(const Token& process, const Message& message);
  void broadcast(const Message& message);
  void send(Peer& peer, const void* bytes, std::size_t size);
  void judge_member(Member& member);
  void show_lost(Member& member, int rank, int because);
  void look_for_end(Member& member);
  /// The peer has not heard yet that this rank has left, and may take its end for a death.
  static bool still_to_hear(const Member& member, const Peer& peer);
  const Member& member(int number) const;
  Member& member(int number) { return const_cast<Member&>(std::as_const(*this).member(number)); }
  void connect_all(Member& member, const std::vector<ProcessInfo>& ranks, Clock::time_point deadline,
                   std::unique_lock<std::mutex>& lock);
  Message about(const Member& member, MessageType type) const;
  void apply_to(Member& member, const Message& message);
  // Of waits.cpp.
  void look_at_waits(Member& member, Clock::time_point now);
  std::chrono::milliseconds between_looks(const Member& member) const;
  void look_at_own(Member& member);
  void report(Member& member, int peer, std::chrono::nanoseconds lasted, bool late);
  void look_for_failures(Member& member);
  static bool leaves_out(const Member& member, int rank, int peer);
  bool is_gone(const Rank& rank) const;  ///< its process has ended, and it had not left the buffer
  void judge_waits(Member& member);
  void hear_of_wait(Member& member, const Message& message);
  void show_sign(const Token& process, const Message& message);
  void lose(Member& member, const LostRank& verdict);
  std::string why_not_connected(const Member& member, const Peer& peer) const;

  const Settings settings_;
  const HomeProcess home_;
  const Token process_ = random_token();
  const Token secret_ = random_token();
  UniqueFd wake_;
  UniqueFd unix_listener_;
  TcpListener tcp_;
  mutable std::mutex mutex_;
  std::thread thread_;
  bool ending_ = false;
  Peers peers_;
  std::list<Caller> callers_;
  std::list<Member> members_;
  int members_so_far_ = 0;
  Clock::time_point listens_again_{};  ///< later, where there are no descriptors left
  std::vector<Message> recent_;        ///< the last ones, for connections that are made again
};

/// "process 77 on node-a"
std::string describe(const ProcessInfo& info);

/// A buffer's part in the control plane.
class Membership {
 public:
  /// Collective. Null where the control plane is off on some rank; with masks that is an InvalidArgument on all.
  static std::unique_ptr<Membership> join(const std::shared_ptr<Plane>& plane, Bootstrap& bootstrap, const Words& words,
                                          const JoinOptions& options = {});
  /// Says goodbye.
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  /// The rank because of which nothing comes from `rank` any more; kNobody: something may come.
  int lost_for(int rank) const { return plane_->lost_for(member_, rank); }
  /// The ranks whose processes have ended.
  std::vector<int> gone() const { return plane_->gone(member_); }
  bool is_gone(int rank) const;
  /// "the process of rank 3 has ended (process 77 on node-a)"
  std::string describe_end(int rank) const;
  /// "the process of rank 3 has ended (process 77 on node-a)"; of several, all are named. `also`: so has that of this
  /// rank, which another one has seen before; kNobody: none. Empty where none has.
  std::string describe_gone(int also = kNobody) const;
  /// Verdicts, in the order in which they were heard. In the end all ranks have the same set of them.
  std::vector<LostRank> lost() const { return plane_->verdicts(member_); }
  /// With masks: the others go on without this rank.
  bool given_up() const { return lost_for(rank_) != kNobody; }

  // With masks.

  /// This rank's program leaves `rank` out from now on, or does so no longer. A wait of `rank` for this one says
  /// nothing about this one meanwhile.
  void leave_out(int rank, bool on) { plane_->leave_out(member_, rank, on); }
  /// At the end of the buffer. Returns when all ranks that are not lost, nor left out by this rank's program, have come
  /// here or have left the buffer: true. After `most_s` (0: for ever) a warning names those that have not come: false.
  bool meet(double most_s);
  /// By all ranks, between two barriers of the bootstrap: forgets the verdicts so far.
  void resume() { plane_->resume(member_); }

 private:
  Membership(std::shared_ptr<Plane> plane, std::vector<ProcessInfo> ranks, int rank, int member);

  std::shared_ptr<Plane> plane_;
  std::vector<ProcessInfo> ranks_;
  int rank_;
  int member_;
};

}  // namespace deep_ep::control
