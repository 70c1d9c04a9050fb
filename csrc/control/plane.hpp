// The control plane of this process: one thread that knows which processes of the job have ended, and tells the waits
// of kernels. It is connected to those of the other processes, makes no CUDA call, and knows no kernels.
//
// A process has ended where its descriptor (pidfd) says so, or where its connection within the host ends: nothing else
// closes that. A connection between hosts may break for other reasons: it is made again. Only a process of the other
// host that has seen the end, or a port that refuses calls, says that the process has ended. Silence says nothing.
//
// A rank that leaves a buffer says so, so that the end of its process is no loss for that buffer.
#pragma once

#include <poll.h>

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
struct Card {
  ProcessIdentity identity = {};
  Token process = {};  ///< random
  Token secret = {};   ///< a caller must show it
  std::uint64_t pid_namespace = 0;
  std::int32_t pid = 0;
  std::uint32_t on = 1;
  std::uint64_t buffer = 0;  ///< rank 0's names the buffer
  Addresses tcp = {};
};

/// Words of a buffer that waits look at. They live as long as the membership.
struct Words {
  std::uint32_t* changes = nullptr;      ///< written last, with release order; 0: nobody is lost
  const std::uint32_t* ended = nullptr;  ///< a wait writes 1 + the lost rank because of which it ended
  std::span<std::uint32_t> lost;         ///< [rank]: 0, or 1 + the rank at the end of the chain
};

class Plane {
 public:
  using Clock = std::chrono::steady_clock;
  /// More are not connected each with each: then only deadlines tell who is lost.
  static constexpr std::size_t kMostProcesses = 64;

  /// The one that buffers of this process share; it ends with the last of them.
  static std::shared_ptr<Plane> of_process();
  explicit Plane(const Settings& settings);
  ~Plane();
  Plane(const Plane&) = delete;
  Plane& operator=(const Plane&) = delete;

  /// Opens what others call: a Unix socket, and with `by_tcp` a TCP port. Not where it only `describes` this process.
  Card card(bool by_tcp, bool describes = false);
  bool reaches_by_unix(const Card& from, const Card& to) const {
    return settings_.unix_sockets && from.identity.same_network(to.identity);
  }

  /// The number of the seat. Returns when this process and the others are connected.
  int sit_down(std::uint64_t buffer, int rank, const std::vector<Card>& ranks, const Words& words);
  void leave(int seat);
  std::vector<int> lost(int seat) const;  ///< as judge() says
  std::vector<int> gone(int seat) const;

 private:
  enum class Link : std::uint8_t { none, connecting, greeting, up };
  struct Peer {
    Card card;
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
    std::size_t address = 0;   ///< of card.tcp
    int error = 0;             ///< of the last attempt
    int refusals = 0;          ///< in a row
    Clock::time_point refused_since{};
    std::vector<std::byte> heard, unsent;
    bool ended = false;
    bool known = false;  ///< it has ended, and the data that it had sent has had time to arrive
    Clock::time_point ended_at{};
  };
  struct Stranger {
    UniqueFd socket;
    Clock::time_point until{};
    Hello hello;
    std::size_t heard = 0;
    bool by_unix = false;
    bool trusted = false;
  };
  struct Seat {
    int number = 0;
    std::uint64_t buffer = 0;
    int rank = 0;
    std::vector<Token> processes;  ///< [rank]
    Words words;
    std::vector<RankFacts> facts;
    std::vector<bool> left;
    std::vector<int> lost;
    bool told = false;  ///< that this rank has given up
    Clock::time_point since{};
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
  bool hear(Stranger& stranger);
  bool adopt(Stranger& stranger);
  void obey(const Peer& from, const Message& message);
  void note(const Token& process, const Message& message);
  void say(const Message& message);
  void send(Peer& peer, const void* bytes, std::size_t size);
  void judge_again(Seat& seat);
  void look_for_end(Seat& seat);
  const Seat& seat(int number) const;
  void connect_all(Seat& seat, std::uint64_t buffer, int rank, const std::vector<Card>& ranks, const Words& words,
                   Clock::time_point deadline, std::unique_lock<std::mutex>& lock);
  std::string why_not_connected(const Seat& seat, const Peer& peer) const;

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
  std::list<Stranger> strangers_;
  std::list<Seat> seats_;
  int seats_so_far_ = 0;
  Clock::time_point listens_again_{};  ///< later, where there are no descriptors left
  std::vector<Message> said_;          ///< the last ones, for connections that are made again
};

/// "process 77 on node-a"
std::string describe(const Card& card);

/// A buffer's part in the control plane.
class Membership {
 public:
  /// Collective. Null where all ranks are in this process, where it is off, or where there are too many processes.
  static std::unique_ptr<Membership> join(const std::shared_ptr<Plane>& plane, Bootstrap& bootstrap,
                                          const Words& words);
  /// Says goodbye.
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  /// Because of which rank nothing comes of `rank` any more; kNobody: something may.
  int lost_for(int rank) const;
  /// Whose processes have ended.
  std::vector<int> gone() const { return plane_->gone(seat_); }
  /// "the process of rank 3 has ended (process 77 on node-a)"; of several, all are named. `also`: so has that of this
  /// rank, which another one has seen before; kNobody: none. Empty where none has.
  std::string describe_gone(int also = kNobody) const;

 private:
  Membership(std::shared_ptr<Plane> plane, std::vector<Card> ranks, int seat);

  std::shared_ptr<Plane> plane_;
  std::vector<Card> ranks_;
  int seat_;
};

}  // namespace deep_ep::control
