// One of two emulated machines: its ranks, and then the machine itself, exchange data and signals with the other over
// RoCE. Then machine 1 goes away, and machine 0 must be told so. Usage: deep_ep_rxe_machine ID PEER_ADDRESS
#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>

#include "csrc/support/deadline.hpp"
#include "csrc/support/unique_fd.hpp"
#include "tests/cluster/cluster.hpp"
#include "tests/rxe/ends.hpp"
#include "tests/rxe/machine_ranks.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::rdma::verbs::test {
namespace {

using deep_ep::test::require;

constexpr std::uint16_t kPort = 18600;
constexpr std::uint32_t kBytes = 512 << 10;
constexpr std::uint64_t kSignal = std::uint64_t{2} << 20;
constexpr std::uint64_t kOldValue = kSignal + 8;

sockaddr_in socket_address(const char* address) {
  sockaddr_in result{};
  result.sin_family = AF_INET;
  result.sin_port = htons(kPort);
  require(::inet_pton(AF_INET, address, &result.sin_addr) == 1, "an IPv4 address");
  return result;
}

/// Machine 0 listens, machine 1 calls until somebody answers.
UniqueFd meet(int id, const char* peer) {
  const sockaddr_in address = socket_address(id == 0 ? "0.0.0.0" : peer);
  const auto* raw = reinterpret_cast<const sockaddr*>(&address);
  const Deadline deadline(deep_ep::test::long_patience());
  while (!deadline.expired()) {
    UniqueFd descriptor(::socket(AF_INET, SOCK_STREAM, 0));
    if (id == 0) {
      require(::bind(descriptor.get(), raw, sizeof(address)) == 0 && ::listen(descriptor.get(), 1) == 0, "listening");
      UniqueFd connection(::accept(descriptor.get(), nullptr, nullptr));
      require(static_cast<bool>(connection), "accept");
      return connection;
    }
    if (::connect(descriptor.get(), raw, sizeof(address)) == 0) return descriptor;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  throw std::runtime_error("the other machine did not come");
}

template <class T>
T exchange(const UniqueFd& connection, const T& own) {
  T other;
  require(::send(connection.get(), &own, sizeof(own), MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(own)), "send");
  require(::recv(connection.get(), &other, sizeof(other), MSG_WAITALL) == static_cast<ssize_t>(sizeof(other)), "recv");
  return other;
}

struct Greeting {
  QueuePairAddress address;
  std::uint32_t remote_key;
  std::uint32_t padding = 0;
};

void run_machine(int id, const char* peer) {
  const UniqueFd connection = meet(id, peer);
  PathOptions path;  // Gives up after 7.5 s.
  path.gid_index = 1;
  End end("rxe0", std::size_t{4} << 20, 1, 64, path);
  const Greeting other = exchange(connection, Greeting{end.pair(0).address(), end.remote_key()});
  end.pair(0).connect(other.address);
  exchange(connection, 'c');

  std::vector<std::byte> expected(kBytes);
  WireOperation data{.queue_pair = end.pair(0).number(),
                     .id = 1,
                     .length = kBytes,
                     .local_key = end.local_key(),
                     .remote_key = other.remote_key,
                     .remote_address = kBytes};
  WireOperation signal = data;
  signal.id = 2;
  signal.kind = WireOperationKind::fetch_add;
  signal.signalled = true;
  signal.length = 8;
  signal.local_address = kOldValue;
  signal.remote_address = kSignal;
  signal.add = 1;
  for (std::uint64_t round = 1; round <= 5; ++round) {
    fill_pattern(end.memory().first(kBytes), 2 * round + static_cast<std::uint64_t>(id));
    require(end.wire().post(std::array{data, signal}) == 2, "room for two operations");
    const Deadline deadline(deep_ep::test::long_patience());
    while (end.word(kSignal) != round) {
      require(!deadline.expired(), fmt::format("round {}: the signal is {}", round, end.word(kSignal)));
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    fill_pattern(expected, 2 * round + static_cast<std::uint64_t>(1 - id));
    require(std::memcmp(end.memory().data() + kBytes, expected.data(), kBytes) == 0, "the other machine's bytes");
    const auto completions = run(end.wire(), {}, 1);
    require(completions[0].id == 2 && completions[0].syndrome == Syndrome::none, "the signal's completion");
    require(end.word(kOldValue) == round - 1, "the signal's old value");
    exchange(connection, 'r');
  }
  if (id == 1) {
    // Only when the other one has all it needs: what is on its way when the machine is switched off is lost.
    char farewell = 0;
    require(::recv(connection.get(), &farewell, 1, MSG_WAITALL) == 1, "the other machine's farewell");
    return;
  }
  require(::send(connection.get(), "f", 1, MSG_NOSIGNAL) == 1, "farewell");

  while (true) {
    const auto completions = run(end.wire(), std::array{signal}, 1);
    if (completions[0].syndrome == Syndrome::none) continue;
    require(completions[0].syndrome == Syndrome::transport_retries_exceeded,
            std::string(text(completions[0].syndrome)));
    std::printf("machine 0: %s\n", std::string(text(completions[0].syndrome)).c_str());
    return;
  }
}

}  // namespace
}  // namespace deep_ep::rdma::verbs::test

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: deep_ep_rxe_machine 0|1 PEER_ADDRESS\n");
    return 2;
  }
  const int id = std::string(argv[1]) == "0" ? 0 : 1;
  try {
    deep_ep::test::run_machine_ranks(id, argv[2]);
    std::printf("machine %d: two ranks reach those of the other machine, by hand and in low-latency calls\n", id);
    deep_ep::rdma::verbs::test::run_machine(id, argv[2]);
    std::printf("machine %d: five rounds of data and signals are right\n", id);
    return 0;
  } catch (const std::exception& error) {
    std::printf("machine %d: FAILED: %s\n", id, error.what());
    return 1;
  }
}
