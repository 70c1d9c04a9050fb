#include "csrc/rdma/rails.hpp"

#include <cstring>
#include <span>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {
std::string why_unreached(Bootstrap& bootstrap, int width, const MakePaths& make) {
  const int rank = bootstrap.rank();
  const int nodes = bootstrap.size() / width;
  const int rail = rank % width;
  const int next = (rank / width + 1) % nodes * width;
  const int previous = (rank / width + nodes - 1) % nodes * width;
  const auto count = 2 * static_cast<std::size_t>(width);
  std::unique_ptr<Paths> paths;
  std::vector<QueuePairAddress> mine;
  agree(bootstrap, "making queue pairs that try other rails", [&] {
    paths = make(count);
    for (std::size_t path = 0; path < count; ++path) mine.push_back(paths->address(path));
  });
  const std::vector<std::byte> bytes = bootstrap.all_gather(std::as_bytes(std::span<const QueuePairAddress>(mine)));
  const auto address = [&](int of, int path) {
    QueuePairAddress found;
    const std::size_t place = static_cast<std::size_t>(of) * count + static_cast<std::size_t>(path);
    std::memcpy(static_cast<void*>(&found), bytes.data() + place * sizeof found, sizeof found);
    return found;
  };

  const auto try_others = [&](const auto& step) {
    return first_failure(bootstrap, [&] {
      for (int other = 0; other < width; ++other) {
        if (other != rail) step(other);
      }
    });
  };
  const auto name = [&](int of, const QueuePairAddress& at) {
    return fmt::format("rank {} (rail {}, GID {} LID {})", of, of % width, GidEntry{.bytes = at.gid}.address(), at.lid);
  };
  const auto attempt = [&](int peer, const QueuePairAddress& there, const auto& step) {
    try {
      step();
    } catch (const Error& error) {
      fail<SystemError>("{} does not reach {}: {}", name(rank, mine.front()), name(peer, there), error.what());
    }
  };
  const auto next_address = [&](int other) { return address(next + other, width + rail); };
  auto failure = try_others([&](int other) {
    const auto path = static_cast<std::size_t>(other);
    const QueuePairAddress to = next_address(other);
    const QueuePairAddress from = address(previous + other, rail);
    attempt(next + other, to, [&] { paths->connect(path, to); });
    attempt(previous + other, from, [&] { paths->connect(path + static_cast<std::size_t>(width), from); });
  });
  // The queue pairs stay until all ranks have sent.
  if (!failure) {
    failure = try_others([&](int other) {
      attempt(next + other, next_address(other), [&] { paths->reach(static_cast<std::size_t>(other)); });
    });
  }
  return failure ? failure->why : std::string();
}

}  // namespace deep_ep::rdma
