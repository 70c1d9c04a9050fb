// Steps that all ranks make together, and that must fail together: a rank that throws alone leaves its peers waiting
// in their next collective until the deadline.
#pragma once

#include <cstring>
#include <functional>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "deep_ep/bootstrap.hpp"

namespace deep_ep {

/// Runs `step` on this rank. When it fails anywhere, every rank throws: the ranks where it failed their own exception,
/// the others a SystemError "<what> failed on rank 3: <its text>". The others learn of it in this call, or, over
/// BufferExchanges, in their next exchange: there a step that goes well costs no exchange, and is no barrier.
void agree(Bootstrap& bootstrap, std::string_view what, const std::function<void()>& step);

/// Throws RankMismatch, naming the sizes, unless all ranks brought the same number of bytes. `sizes`: one per rank.
void require_equal_sizes(std::span<const std::uint64_t> sizes);

/// Throws InvalidArgument unless 0 <= rank < size.
void require_rank(int rank, int size);

/// All-gather of one plain value per rank.
template <class T>
std::vector<T> all_gather_values(Bootstrap& bootstrap, const T& mine) {
  static_assert(std::is_trivially_copyable_v<T>);
  const std::vector<std::byte> bytes = bootstrap.all_gather(std::as_bytes(std::span<const T>(&mine, 1)));
  std::vector<T> all(static_cast<std::size_t>(bootstrap.size()));
  std::memcpy(all.data(), bytes.data(), all.size() * sizeof(T));
  return all;
}

}  // namespace deep_ep
