// Parts that the transports of the library and the exchanges over them share.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {

/// Runs `step` on this rank. Nothing: it has gone well on all ranks. Else the first rank where it has failed, and why:
/// all ranks return the same, and may try something else.
struct FirstFailure {
  std::ptrdiff_t rank = 0;
  std::string why;
};
std::optional<FirstFailure> first_failure(Bootstrap& bootstrap, const std::function<void()>& step);

/// Throws InvalidArgument unless 0 <= rank < size.
void require_rank(int rank, int size);

/// Ranks are processes of this host that have opened one file, which is empty at first and serves no other group.
std::shared_ptr<Bootstrap> make_file_bootstrap(int fd, int rank, int size, double timeout_s);

/// All-gather of one plain value per rank.
template <class T>
std::vector<T> all_gather_values(Bootstrap& bootstrap, const T& mine) {
  static_assert(std::is_trivially_copyable_v<T>);
  const std::vector<std::byte> bytes = bootstrap.all_gather(std::as_bytes(std::span<const T>(&mine, 1)));
  std::vector<T> all(static_cast<std::size_t>(bootstrap.size()));
  std::memcpy(all.data(), bytes.data(), all.size() * sizeof(T));
  return all;
}

/// Another rank has left the buffer (it was broken there, or dropped), or its process has ended. It takes part in no
/// exchange of the buffer any more.
class PeerLeft : public SystemError {
 public:
  using SystemError::SystemError;
};

}  // namespace deep_ep
