// The control plane of this process: one thread that knows which processes of the job have ended, and for which ranks
// others wait; it decides which ranks are lost, and tells the waits of kernels. It makes no CUDA call, and knows no
// kernels.
//
// Each process calls each other one: it speaks by its own call, and hears by the calls of the others. A process has
// ended if its descriptor (pidfd) says so, or if a call to it within the host ends: that takes the end of the process,
// or of its last buffer. A call to another host may break for other reasons, and is made again. Only a process of that
// host that has seen the end, or a port that refuses calls, says that the process has ended. Silence says nothing
// before a wait has lasted longer than the time-out.
//
// With masks the lowest rank that is neither lost nor silent decides. A thread that hears of a lost rank for the first
// time tells all others before it tells its own kernels: so all ranks that go on hear of it, or none does, though the
// rank that decided may end half way.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
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

class Membership;

struct Settings {
  bool on = true;            ///< DEEP_EP_CONTROL
  PortRange ports;           ///< DEEP_EP_CONTROL_PORTS
  bool unix_sockets = true;  ///< within a network namespace; tests switch them off
  double connect_s = 30;     ///< how long the processes of a buffer take at most to connect
};

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
/// "process 77 on node-a"
std::string describe(const ProcessInfo& info);

/// Words of a buffer that its rank's waits read and write: see ControlWords in kernels/common/faults.hpp. They live as
/// long as the membership. Spans are [ranks] or longer.
struct Words {
  std::uint32_t* changes = nullptr;
  const std::uint32_t* ended = nullptr;
  /// 0, or 1 + a rank. Without masks: the end of the chain of waits. With masks the lost rank itself, or, for this
  /// rank, the one whose report decided.
  std::span<std::uint32_t> lost = {};
  std::span<const std::uint32_t> beats = {};
  std::span<const std::uint64_t> waits = {};
  std::span<const std::uint32_t> wanted = {};
  std::span<std::uint32_t> failed = {};
};

struct JoinOptions {
  double timeout_s = 0;  ///< of waits; 0: they last for ever
  bool masks = false;    ///< ranks go on without those that are lost

  std::chrono::nanoseconds timeout() const;
};

/// The connections, and the thread.
class Plane {
 public:
  using Clock = std::chrono::steady_clock;
  /// The one that buffers of this process share; it ends with the last of them.
  static std::shared_ptr<Plane> of_process();
  explicit Plane(const Settings& settings);
  ~Plane();
  Plane(const Plane&) = delete;
  Plane& operator=(const Plane&) = delete;

  /// Opens what others call: a Unix socket, and with `by_tcp` a TCP port.
  ProcessInfo info(bool by_tcp);
  bool reaches_by_unix(const ProcessInfo& from, const ProcessInfo& to) const {
    return settings_.unix_sockets && from.identity.same_network(to.identity);
  }
  /// Without a goodbye, as when the process ends.
  void stop();

 private:
  friend class Membership;
  /// calling: not answered yet. ended: the process has.
  enum class Link : std::uint8_t { none, calling, up, ended };
  struct Peer {
    ProcessInfo info;
    int rank = 0;  ///< a rank of it, for messages
    bool by_unix = false;
    UniqueFd process;  ///< pidfd
    Connection to;
    Link link = Link::none;
    Clock::time_point next{};  ///< none: of the next call. calling: its end. ended: its data has had time to arrive
    bool known = false;        ///< that time is over
    bool was_up = false;
    std::size_t address = 0;  ///< of info.tcp
    int error = 0;            ///< of the last call
    std::optional<Clock::time_point> refused_since;
  };
  struct Caller {
    Connection from;
    Clock::time_point until{};  ///< it is one of the job's
    Hello hello = {};
    bool trusted = false;   ///< it has shown the token
    bool answered = false;  ///< a buffer of this process has ranks of it: it is heard
  };

  void start_thread();
  void run();
  void wake() const;
  // All below with the mutex held.
  void close_descriptors();
  void connect(const Membership& member, std::unique_lock<std::mutex>& lock);
  std::string why_not_connected(const Membership& member, const Peer& peer) const;
  bool is_heard(const Token& process) const;
  Clock::time_point step(Clock::time_point now);
  void call(Peer& peer);
  void serve(Peer& peer);
  void failed(Peer& peer, int error);
  void set_link(Peer& peer, Link link, Clock::duration until_next = {});
  void has_ended(Peer& peer, bool seen_here);
  void accept_from(const UniqueFd& listener, bool by_unix);
  void serve(Caller& caller);
  bool understand(Caller& caller);
  void broadcast(const Message& message);
  void apply(const Token& process, const Message& message);

  inline static std::mutex planes_mutex_;
  inline static std::set<Plane*> planes_;  ///< of this process
  const Settings settings_;
  const HomeProcess home_;
  const Token process_ = random_token();
  const Token secret_ = random_token();
  UniqueFd wake_;
  UniqueFd unix_listener_;
  Clock::time_point listens_again_{};  ///< callers wait while there are no descriptors
  TcpListener tcp_;
  std::mutex mutex_;
  std::thread thread_;
  bool ending_ = false;
  std::map<Token, Peer> peers_;
  std::list<Caller> callers_;
  std::vector<Membership*> members_;
  std::vector<Message> recent_;  ///< the last ones, for connections that are made again
};

/// A rank's part of a buffer in the control plane: what is known of the other ranks, and the verdicts on them.
class Membership {
 public:
  /// Collective. Null where the control plane is off on some rank; with masks that is an InvalidArgument on all.
  static std::unique_ptr<Membership> join(const std::shared_ptr<Plane>& plane, Bootstrap& bootstrap, const Words& words,
                                          const JoinOptions& options = {});
  /// Returns when the processes of the other ranks and this one are connected.
  Membership(std::shared_ptr<Plane> plane, std::uint64_t buffer, int rank, std::span<const ProcessInfo> ranks,
             const Words& words, const JoinOptions& options = {});
  /// Says goodbye. If a TCP connection is down, waits until it is made again, for 5 s at most.
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  /// The rank because of which nothing comes from `rank` any more; kNobody: something may come. With masks each lost
  /// rank itself.
  int lost_for(int rank) const;
  /// The ranks whose processes have ended, as far as this rank has seen or heard.
  std::vector<int> gone() const;
  bool is_gone(int rank) const;
  /// "the process of rank 3 has ended (process 77 on node-a)"
  std::string describe_end(int rank) const;
  /// The same of all that are gone; empty: none is.
  std::string describe_gone() const;
  /// Verdicts, in the order in which they were heard. In the end all ranks have the same set of them.
  std::vector<LostRank> lost() const;

  // With masks.

  /// This rank's program leaves `rank` out from now on, or does so no longer. A wait of `rank` for this one says
  /// nothing about this one meanwhile.
  void leave_out(int rank, bool on);
  /// At the end of the buffer: says goodbye, and returns when all ranks that are not lost, nor left out by this rank's
  /// program, have done so: true. After `most_s` (0: for ever) a warning names those that have not: false.
  bool meet(double most_s);
  void leave();
  std::vector<int> awaited_at_end() const;
  /// By all ranks, between two barriers of the bootstrap: forgets the verdicts so far.
  void resume();

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
    bool late = false;
    Time lasted(Time now) const { return std::min(longest, now - since); }
  };
  struct Rank {
    ProcessInfo info;
    bool left = false;
    RankFacts facts{};
    int lost = kNobody;       ///< as in Words
    OwnWait own{};            ///< of this rank for it
    Time sign{};              ///< when it has last reported a wait ...
    int waits_for = kNobody;  ///< ... and for which rank
  };
  struct TheirWait {
    LostRank report;
    bool late = false;
    Time heard{};
  };

  int size() const { return static_cast<int>(ranks_.size()); }
  Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  const Rank& at(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  // All below with the plane's mutex held.
  bool has(const Token& process, bool and_misses = false) const;  ///< a rank of it; misses: that has not left
  const Plane::Peer* peer_of(const Rank& rank) const;
  bool has_gone(const Rank& rank) const;  ///< its process has ended, and it had not left the buffer
  bool is_to_hear(const Rank& rank) const;
  bool leaves_out(int rank, int peer) const { return known_.left_out.contains({rank, peer}); }
  void tell(MessageType type, const LostRank& other = {}, bool flag = false);
  Clock::time_point step(Clock::time_point now);
  void hear(const Token& process, const Message& message);
  void apply(const Message& message);
  void judge();
  void add(const LostRank& verdict);
  void lose(const LostRank& verdict);
  void show_lost(int rank, int because);
  void look_for_end();
  // Of waits.cpp.
  void look_at_own();
  void report(int peer, Time lasted, bool late);
  void look_for_failures();
  void judge_waits();

  const std::shared_ptr<Plane> plane_;
  const std::uint64_t buffer_;
  const int rank_;
  const Words words_;
  const bool masks_;
  const Time timeout_;
  std::vector<Rank> ranks_;
  std::uint32_t round_ = 0;   ///< see Message
  Clock::time_point looked_;  ///< at waits
  Time time_{}, reported_{};
  /// Of this round.
  struct Known {
    std::vector<LostRank> verdicts = {};  ///< of ranks at the ends of chains
    bool told = false;                    ///< that this rank has given up
    std::map<RankPair, TheirWait> waits = {};
    std::set<RankPair> failed = {}, left_out = {};  ///< left_out: the program of `rank` leaves `peer` out
    Time failed_at{};                               ///< the first of them
    Time blamed_since{};                            ///< a rank is about to be lost
  } known_;
};

}  // namespace deep_ep::control
