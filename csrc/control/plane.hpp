// The connections of this process to the other processes of its buffers, and the one thread that serves them. It makes
// no CUDA call, and knows no kernels. It carries reports, and knows which processes have ended; what follows from both
// is the business of memberships: see membership.hpp.
//
// There is one connection to each process, which the one with the lower token makes. Within a host only the end of the
// process, or of its last buffer, ends it, or refuses a call. Between hosts it may break for other reasons. Then both
// call: it is made again, or a port that refuses says that the process has ended.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "csrc/control/messages.hpp"
#include "csrc/control/sockets.hpp"
#include "csrc/memory/process_identity.hpp"
#include "csrc/support/token.hpp"
#include "csrc/support/unique_fd.hpp"

namespace deep_ep::control {

class Membership;

struct Settings {
  bool on = true;         ///< DEEP_EP_CONTROL
  PortRange ports;        ///< DEEP_EP_CONTROL_PORTS
  double connect_s = 30;  ///< how long the processes of a buffer take at most to connect
};

/// A process describes itself. Plain data, which travels through the bootstrap.
struct ProcessInfo {
  ProcessIdentity identity = {};
  Token process = {};  ///< random
  Token secret = {};   ///< a caller must show it
  std::int32_t pid = 0;
  std::uint32_t on = 1;
  std::uint64_t buffer = 0;  ///< that of rank 0 names the buffer
  SocketAddress tcp = {};
};
/// At which it listens for processes of its network namespace.
SocketAddress unix_address_of(const ProcessInfo& info);
/// "process 77 on node-a"
std::string describe(const ProcessInfo& info);

class Plane {
 public:
  using Clock = std::chrono::steady_clock;
  /// The one that buffers of this process share; it ends with the last of them.
  static std::shared_ptr<Plane> of_process();
  explicit Plane(const Settings& settings);
  ~Plane() { stop(); }
  Plane(const Plane&) = delete;
  Plane& operator=(const Plane&) = delete;

  /// Opens what others call: a Unix socket, and with `by_tcp` a TCP port.
  ProcessInfo info(bool by_tcp);
  /// Without a goodbye, as when the process ends.
  void stop();

 private:
  friend class Membership;
  /// calling: not answered yet. ended: the process has; what it sent before arrives until `next`.
  enum class Link : std::uint8_t { none, calling, up, ended };
  struct Peer {
    ProcessInfo info;
    SocketAddress address;
    Connection connection;
    Link link = Link::none;
    Clock::time_point next{};  ///< when the link changes if nothing happens
    int error = 0;             ///< of the last call
    int refusals = 0;          ///< of the last calls
  };

  void run();
  // All below with the mutex held.
  void close_descriptors();
  void connect(Membership& member, std::unique_lock<std::mutex>& lock);
  std::string why_not_connected(const Membership& member, int rank) const;
  bool calls(const Peer& peer) const { return process_ < peer.info.process; }
  void step(Clock::time_point now);
  void call(Peer& peer);
  void serve(Peer& peer);
  void failed(Peer& peer, int error);
  void set_link(Peer& peer, Link link, Clock::duration until_next = {});
  void accept_from(const UniqueFd& listener);
  bool stays_strange(Connection& caller);
  /// Tells all processes of a buffer what this rank has to say.
  void say(const Membership& member);
  void say(const Membership& member, Peer& peer);

  inline static std::mutex mutex_;         ///< of all planes: a process has one, but in tests
  inline static std::set<Plane*> planes_;  ///< of this process
  inline static std::weak_ptr<Plane> shared_;
  const Settings settings_;
  const Token process_ = random_token();
  const Token secret_ = random_token();
  UniqueFd unix_listener_, tcp_listener_;
  SocketAddress tcp_address_;
  std::thread thread_;
  std::atomic<bool> ending_ = false;
  std::map<Token, Peer> peers_;
  std::list<Connection> strangers_;  ///< callers that have not shown the token yet
  std::vector<Membership*> members_;
};

}  // namespace deep_ep::control
