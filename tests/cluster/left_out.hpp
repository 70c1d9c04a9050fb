// Two ranks that cannot hear of each other, with masks: all agree to go on without one of them.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_case.hpp"

namespace deep_ep::test {

/// A few dispatches by all ranks, until all have heard of it. Then either `one` or `other` is left out: it has been
/// told so, and all the others have masked it and nobody else.
inline void dispatch_until_one_is_left_out(Rank& rank, Buffer& buffer, const LowLatencyCase& all, int one, int other) {
  bool left_out = false;
  for (int call = 0; call < 3; ++call) {
    try {
      buffer.low_latency_dispatch(upload_arguments(rank, all), rank.call());
      rank.executor()->synchronize(rank.stream());
    } catch (const TimeoutError& error) {
      const std::string text = error.what();
      require(text.find("all have masked it") != std::string::npos, "who is left out is told so, not: " + text);
      left_out = true;
    }
    rank.bootstrap()->barrier();  // a rank that has waited in vain is not late for the next call
  }
  const int ranks = rank.bootstrap()->size();
  std::vector<std::int32_t> mine(static_cast<std::size_t>(ranks), -1);
  if (!left_out) {
    const TensorView status = rank.upload(mine, DType::int32, {ranks});
    buffer.low_latency_query_mask(status, rank.call().stream);
    mine = rank.download<std::int32_t>(status);
  }
  const std::vector<std::byte> gathered = rank.bootstrap()->all_gather(std::as_bytes(std::span(mine)));
  std::vector<std::int32_t> masks(gathered.size() / sizeof(std::int32_t));
  std::memcpy(masks.data(), gathered.data(), gathered.size());
  const auto of = [&](int observer, int peer) { return masks[static_cast<std::size_t>(observer * ranks + peer)]; };
  const int lost = of(one, one) == -1 ? one : other;
  for (int observer = 0; observer < ranks; ++observer) {
    for (int peer = 0; peer < ranks; ++peer) {
      const int expected = observer == lost ? -1 : peer == lost ? 1 : 0;
      require(of(observer, peer) == expected,
              "rank " + std::to_string(observer) + " says " + std::to_string(of(observer, peer)) + " of rank " +
                  std::to_string(peer) + ", where rank " + std::to_string(lost) + " is left out");
    }
  }
}

}  // namespace deep_ep::test
