// How a call ends that ranks mean in different ways.
#pragma once

#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tests/cluster/cluster.hpp"
#include "tests/cluster/exchange.hpp"
#include "tests/cluster/low_latency_case.hpp"

namespace deep_ep::test {

/// The call, or the check behind it, ends in a RankMismatch with these words.
inline void require_mismatch(Buffer& buffer, const std::vector<std::string>& words, const std::function<void()>& call) {
  require_throws<RankMismatch>(
      [&] {
        call();
        buffer.check();  // without a host wait, the call itself cannot know
      },
      words, "a call that ranks mean differently");
}

/// On every rank: none gets a result, at least one says `words` in a RankMismatch, and the others have heard of it
/// from such a rank.
inline void require_disagreement(Rank& rank, const std::vector<std::string>& words, const std::function<void()>& call) {
  std::string wrong;
  char named = 0;
  try {
    call();
    wrong = "nothing was thrown";
  } catch (const RankMismatch& error) {
    const std::string text = error.what();
    if (text.find("has ended the call, and its own error says why") == std::string::npos) {
      named = 1;
      for (const std::string& word : words) {
        if (text.find(word) == std::string::npos) wrong = "'" + word + "' not in: " + text;
      }
    }
  } catch (const std::exception& error) {
    wrong = error.what();
  }
  // Everybody comes here before anybody gives up, so that failures are reported as they are.
  const std::vector<std::byte> all = rank.bootstrap()->all_gather(std::as_bytes(std::span(&named, 1)));
  require(wrong.empty(), wrong);
  require(std::ranges::count(all, std::byte{1}) > 0, "no rank found the mismatch");
}

/// The same of a call on buffers of their own; rank 1 is the odd one.
inline void expect_disagreement(const ClusterOptions& cluster, const BufferOptions& options,
                                const std::vector<std::string>& words,
                                const std::function<void(Rank&, Buffer&, bool odd)>& call) {
  run_cluster(cluster, [&](Rank& rank) {
    Buffer& buffer = rank.buffer(options);
    require_disagreement(rank, words, [&] {
      call(rank, buffer, rank.rank() == 1);
      buffer.check();
    });
  });
}

}  // namespace deep_ep::test
