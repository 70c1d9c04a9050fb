#include "csrc/rdma/rails.hpp"

#include <array>
#include <span>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {
namespace {

using Reason = std::array<char, 600>;

/// The first rank's, if there is one.
std::string first_reason(Bootstrap& bootstrap, const Reason& mine) {
  for (const Reason& one : all_gather_values(bootstrap, mine)) {
    if (one[0] != '\0') return one.data();
  }
  return {};
}

}  // namespace

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

  Reason reason{};
  const auto attempt = [&](int peer, const QueuePairAddress& there, const std::function<void()>& step) {
    if (reason[0] != '\0') return;
    try {
      step();
    } catch (const Error& error) {
      const auto place = [](const QueuePairAddress& one) {
        return fmt::format("GID {} LID {}", GidEntry{.bytes = one.gid}.address(), one.lid);
      };
      fmt::format("rank {} (rail {}, {}) does not reach rank {} (rail {}, {}): {}", rank, rail, place(mine.front()),
                  peer, peer % width, place(there), error.what())
          .copy(reason.data(), reason.size() - 1);
    }
  };
  for (int other = 0; other < width; ++other) {
    if (other == rail) continue;
    const auto path = static_cast<std::size_t>(other);
    const QueuePairAddress to = address(next + other, width + rail);
    const QueuePairAddress from = address(previous + other, rail);
    attempt(next + other, to, [&] { paths->connect(path, to); });
    attempt(previous + other, from, [&] { paths->connect(path + static_cast<std::size_t>(width), from); });
  }
  std::string first = first_reason(bootstrap, reason);
  if (!first.empty()) return first;
  for (int other = 0; other < width; ++other) {
    if (other == rail) continue;
    attempt(next + other, address(next + other, width + rail), [&] { paths->reach(static_cast<std::size_t>(other)); });
  }
  // The queue pairs stay until all ranks have sent.
  return first_reason(bootstrap, reason);
}

}  // namespace deep_ep::rdma
