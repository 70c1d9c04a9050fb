#include "tests/rxe/socket_bootstrap.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <cstring>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "csrc/support/deadline.hpp"
#include "csrc/support/unique_fd.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

constexpr std::uint16_t kPort = 18601;

void expect(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(std::string("socket bootstrap: ") + what);
}

void send_all(const UniqueFd& to, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(to.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    expect(sent > 0, "a rank went away (send)");
    bytes = bytes.subspan(static_cast<std::size_t>(sent));
  }
}

void receive_all(const UniqueFd& from, std::span<std::byte> bytes) {
  if (bytes.empty()) return;
  const ssize_t received = ::recv(from.get(), bytes.data(), bytes.size(), MSG_WAITALL);
  expect(received == static_cast<ssize_t>(bytes.size()), "a rank went away (recv)");
}

sockaddr_in address_of(const char* address) {
  sockaddr_in result{};
  result.sin_family = AF_INET;
  result.sin_port = htons(kPort);
  expect(::inet_pton(AF_INET, address, &result.sin_addr) == 1, "the hub's IPv4 address is wrong");
  return result;
}

/// [rank]: who rank 0 talks to; the others know rank 0 alone.
class Sockets {
 public:
  Sockets(int rank, int size, const std::string& hub) : rank_(rank), peers_(static_cast<std::size_t>(size)) {
    rank == 0 ? listen() : call(hub);
  }

  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) {
    const std::size_t bytes = mine.size();
    if (rank_ != 0) {
      send_all(peers_[0], mine);
      receive_all(peers_[0], all);
      return;
    }
    if (bytes != 0) std::memcpy(all.data(), mine.data(), bytes);
    for (std::size_t peer = 1; peer < peers_.size(); ++peer)
      receive_all(peers_[peer], all.subspan(peer * bytes, bytes));
    for (std::size_t peer = 1; peer < peers_.size(); ++peer) send_all(peers_[peer], all);
  }

 private:
  void listen() {
    const UniqueFd listener(::socket(AF_INET, SOCK_STREAM, 0));
    const int yes = 1;
    ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    const sockaddr_in address = address_of("0.0.0.0");
    expect(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0, "bind");
    expect(::listen(listener.get(), static_cast<int>(peers_.size())) == 0, "listen");
    for (std::size_t i = 1; i < peers_.size(); ++i) {
      UniqueFd caller(::accept(listener.get(), nullptr, nullptr));
      std::int32_t who = 0;
      receive_all(caller, std::as_writable_bytes(std::span(&who, 1)));
      peers_.at(static_cast<std::size_t>(who)) = std::move(caller);
    }
  }

  void call(const std::string& hub) {
    const sockaddr_in address = address_of(hub.c_str());
    const Deadline deadline(long_patience());
    while (!deadline.expired()) {
      UniqueFd socket(::socket(AF_INET, SOCK_STREAM, 0));
      if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
        const std::int32_t who = rank_;
        send_all(socket, std::as_bytes(std::span(&who, 1)));
        peers_[0] = std::move(socket);
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
    throw std::runtime_error("socket bootstrap: rank 0 did not come");
  }

  int rank_;
  std::vector<UniqueFd> peers_;
};

}  // namespace

std::shared_ptr<Bootstrap> make_socket_bootstrap(int rank, int size, const std::string& hub) {
  const auto sockets = std::make_shared<Sockets>(rank, size, hub);
  return make_callback_bootstrap(rank, size, [sockets](std::span<const std::byte> mine, std::span<std::byte> all) {
    sockets->all_gather(mine, all);
  });
}

}  // namespace deep_ep::test
