// Ranks as threads of this process, each with a bootstrap.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "tests/cluster/processes.hpp"

namespace deep_ep::test {

using RankBody = std::function<void(const std::shared_ptr<Bootstrap>&)>;

/// Runs `body` on every rank and returns what each threw, "" for nothing.
inline std::vector<std::string> run_rank_threads(int ranks, const RankBody& body) {
  const auto bootstraps = make_thread_bootstraps(ranks, 60);
  return run_threads(ranks, [&](int rank) { body(bootstraps[static_cast<std::size_t>(rank)]); });
}

inline void expect_nothing_thrown(const std::vector<std::string>& texts) {
  for (std::size_t rank = 0; rank < texts.size(); ++rank) EXPECT_EQ(texts[rank], "") << "rank " << rank;
}

inline void expect_ranks_succeed(int ranks, const RankBody& body) {
  expect_nothing_thrown(run_rank_threads(ranks, body));
}

}  // namespace deep_ep::test
