#include "csrc/memory/fd_exchange.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/bootstrap/sockets.hpp"
#include "csrc/support/backoff.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/token.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

/// A rank sends this to the others, before they take a descriptor of it. Plain data.
struct Offer {
  Token name;    ///< of the socket; visible to every process of the host
  Token secret;  ///< what a peer must say to be served
};

struct Request {
  Token secret;
  std::int32_t rank = -1;
  std::int32_t padding = 0;
};

SocketAddress address_of(const Token& name) { return unix_address("deep_ep-" + to_string(name)); }

void send_fd(int socket, int fd) {
  char payload = 'f';
  iovec data{.iov_base = &payload, .iov_len = 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  if (::sendmsg(socket, &message, MSG_NOSIGNAL) != 1) {
    fail<SystemError>("sending a file descriptor: {}", errno_text(errno));
  }
}

/// None: it has not come yet.
UniqueFd receive_fd(int socket, std::size_t from) {
  char payload = 0;
  iovec data{.iov_base = &payload, .iov_len = 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t count = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (count < 0 && errno == EAGAIN) return {};
  if (count < 0) fail<SystemError>("receiving a file descriptor from rank {}: {}", from, errno_text(errno));
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (count == 0 || header == nullptr || header->cmsg_type != SCM_RIGHTS) {
    fail<SystemError>(
        "rank {} closed the connection without sending its file descriptor (in this process too many "
        "may be open)",
        from);
  }
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
  return UniqueFd(fd);
}

class Exchange {
 public:
  Exchange(int rank, int fd, std::span<const Offer> offers, const std::vector<bool>& partners, double timeout_s)
      : rank_(static_cast<std::size_t>(rank)), fd_(fd), offers_(offers), partners_(partners), deadline_(timeout_s) {}

  /// Strangers may connect: they are not waited for, and get nothing.
  std::vector<UniqueFd> run(const UniqueFd& listener) const {
    const std::size_t ranks = partners_.size();
    std::vector<UniqueFd> received(ranks), connections(ranks), callers;
    std::vector<bool> served(ranks);
    for (std::size_t peer = 0; peer < ranks; ++peer) {
      served[peer] = peer == rank_ || !partners_[peer];
      if (!served[peer]) connections[peer] = connect_to(peer);
    }
    for (const Backoff wait;; std::this_thread::sleep_for(wait.nap())) {
      take_calls(listener, callers);
      std::erase_if(callers, [&](const UniqueFd& caller) { return answer(caller.get(), served); });
      std::size_t missing = ranks;
      for (std::size_t peer = 0; peer < ranks; ++peer) {
        if (connections[peer] && (received[peer] = receive_fd(connections[peer].get(), peer))) connections[peer] = {};
        if (connections[peer] || !served[peer]) missing = std::min(missing, peer);
      }
      if (missing == ranks) return received;
      require_time(missing);
    }
  }

 private:
  UniqueFd connect_to(std::size_t peer) const {
    UniqueFd socket;
    while (!(socket = call_at(address_of(offers_[peer].name)))) {
      const int error = errno;
      // EAGAIN: the peer's queue of connections is full.
      if (error != EAGAIN && error != EINTR) {
        fail<SystemError>("connecting to the socket of rank {}: {}", peer, errno_text(error));
      }
      require_time(peer);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const Request request{offers_[peer].secret, static_cast<std::int32_t>(rank_), 0};
    if (::send(socket.get(), &request, sizeof(request), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(request))) {
      fail<SystemError>("asking rank {} for its file descriptor: {}", peer, errno_text(errno));
    }
    return socket;
  }

  static void take_calls(const UniqueFd& listener, std::vector<UniqueFd>& callers) {
    for (;;) {
      UniqueFd caller(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!caller && (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED)) return;
      // The caller stays in the queue: to look again would be a loop until the deadline.
      if (!caller) fail<SystemError>("taking a rank's call for a file descriptor: {}", errno_text(errno));
      // Names of sockets are visible to every user, and a caller that stays silent keeps a descriptor of this process.
      if (is_of_this_user(caller.get())) callers.push_back(std::move(caller));
    }
  }

  /// Gives the descriptor to a rank that takes it. False: the caller has not said yet who it is.
  bool answer(int caller, std::vector<bool>& served) const {
    Request request;
    const ssize_t count = ::recv(caller, &request, sizeof(request), 0);
    if (count < 0 && errno == EAGAIN) return false;
    const auto peer = static_cast<std::size_t>(request.rank);
    const bool knows = count == static_cast<ssize_t>(sizeof(request)) && request.secret == offers_[rank_].secret;
    if (!knows || request.rank < 0 || peer >= served.size()) return true;
    send_fd(caller, fd_);
    return served[peer] = true;
  }

  void require_time(std::size_t peer) const {
    if (deadline_.expired()) {
      fail<TimeoutError>("exchange of file descriptors: rank {} waited {} s for rank {}", rank_, deadline_.seconds(),
                         peer);
    }
  }

  std::size_t rank_;
  int fd_;
  std::span<const Offer> offers_;
  const std::vector<bool>& partners_;
  Deadline deadline_;
};

}  // namespace

std::vector<UniqueFd> exchange_fds(Bootstrap& bootstrap, int fd, const std::vector<bool>& partners, double timeout_s) {
  Offer mine;
  UniqueFd listener;
  agree(bootstrap, "offering a file descriptor", [&] {
    mine = {.name = random_token(), .secret = random_token()};
    listener = listen_at(address_of(mine.name));
    if (!listener) fail<SystemError>("listening on a Unix socket: {}", errno_text(errno));
  });
  const std::vector<Offer> offers = all_gather_values(bootstrap, mine);
  std::vector<UniqueFd> received;
  agree(bootstrap, "exchanging file descriptors", [&] {
    // The listener closes when the exchange ends: after a failure peers that still want to connect are refused at once.
    const UniqueFd closed_at_end = std::move(listener);
    received = Exchange(bootstrap.rank(), fd, offers, partners, timeout_s).run(closed_at_end);
  });
  return received;
}

UniqueFd make_sealed_memory(const char* name, std::size_t bytes) {
  UniqueFd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail<SystemError>("memfd_create: {}", errno_text(errno));
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    fail<SystemError>("ftruncate to {}: {}", format_bytes(bytes), errno_text(errno));
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    fail<SystemError>("F_ADD_SEALS: {}", errno_text(errno));
  }
  return fd;
}

}  // namespace deep_ep
