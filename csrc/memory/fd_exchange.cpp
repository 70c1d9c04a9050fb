#include "csrc/memory/fd_exchange.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/bootstrap/sockets.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/token.hpp"

namespace deep_ep {
namespace {

/// The ranks of a host send at most so many descriptors before any is taken. A user without root may have no more under
/// way than `ulimit -n`, 1024 by default.
constexpr std::size_t kUnderWay = 512;

/// Each rank tells the others this.
struct Offer {
  Token name = {};    ///< of the socket at which it takes descriptors; visible to every process of the host
  Token secret = {};  ///< what a peer must say there
  std::size_t partners = 0;
};

/// What comes with a descriptor.
struct Letter {
  Token secret = {};
  std::int64_t rank = -1;
};

/// A letter and the place for one descriptor, as the system takes them.
struct Envelope {
  explicit Envelope(Letter& letter) : text{.iov_base = &letter, .iov_len = sizeof letter} {
    message.msg_iov = &text;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
  }
  Envelope(const Envelope&) = delete;
  Envelope& operator=(const Envelope&) = delete;

  iovec text;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
};

SocketAddress address_of(const Token& name) { return unix_address("deep_ep-" + to_string(name)); }

/// It waits in the peer's queue of calls until the peer takes it, though this rank hangs up.
void send_fd(int fd, int rank, std::size_t peer, const Offer& to) {
  const UniqueFd socket = call_at(address_of(to.name));
  if (!socket || !is_of_this_user(socket.get())) {
    fail<SystemError>("connecting to the socket of rank {}: {}", peer, errno_text(socket ? EPERM : errno));
  }
  Letter letter{.secret = to.secret, .rank = rank};
  Envelope envelope(letter);
  cmsghdr* header = CMSG_FIRSTHDR(&envelope.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  if (::sendmsg(socket.get(), &envelope.message, MSG_NOSIGNAL) != sizeof letter) {
    fail<SystemError>("sending a file descriptor to rank {}: {}", peer, errno_text(errno));
  }
}

/// None: the caller has sent none, or this process may not have more.
UniqueFd receive_fd(int caller, Letter& letter) {
  Envelope envelope(letter);
  const ssize_t count = ::recvmsg(caller, &envelope.message, MSG_CMSG_CLOEXEC);
  const cmsghdr* header = count < 0 ? nullptr : CMSG_FIRSTHDR(&envelope.message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return {};
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return UniqueFd(fd);
}

/// Of all who have called. Strangers may call: they are not waited for.
void receive_fds(const UniqueFd& listener, const Token& secret, std::vector<UniqueFd>& received) {
  for (;;) {
    const UniqueFd caller(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!caller && errno == EAGAIN) return;
    if (!caller) fail<SystemError>("taking a rank's call for a file descriptor: {}", errno_text(errno));
    if (!is_of_this_user(caller.get())) continue;  // names of sockets are visible to every user
    Letter letter;
    UniqueFd fd = receive_fd(caller.get(), letter);
    const auto rank = static_cast<std::size_t>(letter.rank);
    if (letter.secret == secret && rank < received.size() && !received[rank]) received[rank] = std::move(fd);
  }
}

}  // namespace

std::vector<UniqueFd> exchange_fds(Bootstrap& bootstrap, int fd, std::span<const std::size_t> partners) {
  const Offer mine{random_token(), random_token(), partners.size()};
  const UniqueFd listener = listen_at(address_of(mine.name));
  if (!listener) fail<SystemError>("listening on a Unix socket: {}", errno_text(errno));
  const std::vector<Offer> offers = all_gather_values(bootstrap, mine);
  const std::size_t most = std::ranges::max(offers, {}, &Offer::partners).partners;
  const std::size_t at_once = std::max<std::size_t>(1, kUnderWay / (most + 1));
  std::vector<UniqueFd> received(offers.size());
  for (std::size_t begin = 0; begin < most; begin += at_once) {
    // A rank that is taking calls would miss what such a call is yet to bring.
    if (begin != 0) bootstrap.barrier();
    for (std::size_t next = begin; next < std::min(begin + at_once, partners.size()); ++next) {
      send_fd(fd, bootstrap.rank(), partners[next], offers[partners[next]]);
    }
    bootstrap.barrier();  // all that was sent so far is in the queues of its receivers
    receive_fds(listener, mine.secret, received);
  }
  for (const std::size_t peer : partners) {
    if (received[peer]) continue;
    fail<SystemError>("no file descriptor of rank {} has come (in this process too many may be open)", peer);
  }
  return received;
}

}  // namespace deep_ep
