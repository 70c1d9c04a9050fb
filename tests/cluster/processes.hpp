// Ranks for tests of what connects ranks: as threads, with or without a bootstrap, and as processes made by fork.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "tests/support/child_process.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep {

/// Runs `body(rank)` in one thread per rank; what a rank threw comes back as text ("" for none).
inline std::vector<std::string> run_threads(int ranks, const std::function<void(int)>& body) {
  std::vector<std::string> errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

/// The same in processes. Expectations of gtest do not cross processes: a body reports by throwing.
inline std::vector<std::string> run_processes(int ranks, const std::function<void(int)>& body) {
  constexpr std::size_t kText = 1000;
  const std::size_t bytes = kText * static_cast<std::size_t>(ranks);
  auto* texts = static_cast<char*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = test::fork_child();
    if (child == 0) {
      char* text = texts + kText * static_cast<std::size_t>(rank);
      try {
        body(rank);
      } catch (const std::exception& error) {
        std::snprintf(text, kText, "%s", error.what());
      }
      ::_exit(0);  // not the parent's destructors and gtest's report
    }
    children.push_back(child);
  }
  std::vector<std::string> errors;
  for (std::size_t rank = 0; rank < children.size(); ++rank) {
    int status = 0;
    ::waitpid(children[rank], &status, 0);
    const bool normal = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    errors.push_back(normal ? std::string(texts + kText * rank)
                            : "process ended with status " + std::to_string(status));
  }
  ::munmap(texts, bytes);
  return errors;
}

/// A rank that is a thread of this process, and has a bootstrap.
using RankBody = std::function<void(const std::shared_ptr<Bootstrap>&)>;

inline std::vector<std::string> run_rank_threads(int ranks, const RankBody& body) {
  const auto bootstraps = make_thread_bootstraps(ranks, test::long_patience());
  return run_threads(ranks, [&](int rank) { body(bootstraps[static_cast<std::size_t>(rank)]); });
}

/// The same as processes.
inline std::vector<std::string> run_rank_processes(int ranks, const RankBody& body,
                                                   double timeout_s = test::long_patience()) {
  const auto bootstraps = make_thread_bootstraps(ranks, timeout_s);
  return run_processes(ranks, [&](int rank) { body(bootstraps[static_cast<std::size_t>(rank)]); });
}

inline void expect_nothing_thrown(const std::vector<std::string>& texts) {
  for (std::size_t rank = 0; rank < texts.size(); ++rank) EXPECT_EQ(texts[rank], "") << "rank " << rank;
}

inline void expect_ranks_succeed(int ranks, const RankBody& body) {
  expect_nothing_thrown(run_rank_threads(ranks, body));
}

}  // namespace deep_ep
