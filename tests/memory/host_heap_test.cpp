// The symmetric heap on the host: ranks as threads and as processes.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <stdexcept>
#include <vector>

#include "csrc/bootstrap/buffer_exchanges.hpp"
#include "csrc/memory/symmetric_heap.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "tests/cluster/counting_executor.hpp"
#include "tests/cluster/processes.hpp"

namespace deep_ep::test {
namespace {

template <class Rank>
void as_threads(int ranks, Rank rank_body) {
  expect_ranks_succeed(ranks, [&](const auto& bootstrap) { rank_body(*bootstrap); });
}

std::unique_ptr<SymmetricHeap> make_heap(Bootstrap& bootstrap, std::size_t bytes,
                                         const ProcessIdentity& identity = this_process()) {
  return std::make_unique<SymmetricHeap>(make_host_executor(), make_host_heap_memory(identity), bootstrap,
                                         [&](auto) { return bytes; });
}

/// Every rank writes its number into every peer's heap, and finds everybody's in its own.
bool exchange(Bootstrap& bootstrap, SymmetricHeap& heap) {
  const auto mine = static_cast<std::size_t>(bootstrap.rank());
  for (std::byte* peer : heap.peers()) peer[mine * 100] = static_cast<std::byte>(bootstrap.rank() + 1);
  bootstrap.barrier();
  for (int rank = 0; rank < bootstrap.size(); ++rank) {
    if (heap.local()[rank * 100] != static_cast<std::byte>(rank + 1)) return false;
  }
  bootstrap.barrier();
  return true;
}

TEST(HostHeap, RanksOfOtherHostsAreNotMapped) {
  as_threads(4, [&](Bootstrap& bootstrap) {
    const auto host = [](int rank) { return rank / 2; };
    ProcessIdentity identity = this_process();
    if (host(bootstrap.rank()) == 1) identity.boot_id[0] = identity.boot_id[0] == 'x' ? 'y' : 'x';
    const auto heap = make_heap(bootstrap, 10000, identity);
    bool right = true;
    for (int peer = 0; peer < 4; ++peer) {
      const bool mapped = heap->peers()[static_cast<std::size_t>(peer)] != nullptr;
      right &= mapped == (host(peer) == host(bootstrap.rank()));
    }
    bootstrap.barrier();
    if (!right) throw std::runtime_error("a rank of another host is mapped, or one of this host is not");
  });
}

TEST(HostHeap, NobodyCanChangeItsSize) {
  const auto heap = make_host_heap_memory();
  const auto fd = heap->share(heap->create(8192, HeapKind::posix_fd), HeapKind::posix_fd).fd;
  struct stat status {};
  ASSERT_EQ(::fstat(fd->get(), &status), 0);
  EXPECT_EQ(status.st_size, 8192);
  for (const off_t size : {0, 4096, 16384}) {
    EXPECT_EQ(::ftruncate(fd->get(), size), -1) << size;
    EXPECT_EQ(errno, EPERM);
  }
  EXPECT_EQ(::fcntl(fd->get(), F_ADD_SEALS, F_SEAL_WRITE), -1) << "nor make it read-only";
  const char byte = 1;
  EXPECT_EQ(::pwrite(fd->get(), &byte, 1, 8191), 1);
}

/// Each request to the executor fails once, the first one first.
TEST(HostHeap, FailuresToSuspendAndResumeLoseNothing) {
  const auto bootstrap = make_thread_bootstraps(1).front();
  const auto executor = std::make_shared<CountingExecutor>(make_host_executor());
  SymmetricHeap heap(executor, make_host_heap_memory(), *bootstrap, [](auto) { return 8192; });
  const auto is_full_of = [&](int byte) {
    return std::all_of(heap.local(), heap.local() + heap.bytes(),
                       [&](std::byte each) { return each == std::byte(byte); });
  };
  const auto failures_of = [&](const auto& step) {
    for (int failures = 0;; ++failures) {
      executor->refused_request = failures + 1;
      try {
        step();
      } catch (const Refused&) {
        continue;
      }
      executor->refused_request = 0;
      return failures;
    }
  };
  std::fill_n(heap.local(), heap.bytes(), std::byte{90});
  EXPECT_GT(failures_of([&] { heap.keep(*bootstrap); }), 2);
  EXPECT_TRUE(is_full_of(90));
  heap.release_memory();
  EXPECT_TRUE(is_full_of(0));
  EXPECT_GT(failures_of([&] { heap.resume(*bootstrap); }), 4) << "the table of peers, and what the heap holds";
  EXPECT_TRUE(is_full_of(90));
}

/// The others see its memory where that of the process before was.
TEST(HostHeap, ANewProcessTakesThePlaceOfAnother) {
  if (test::under_thread_sanitizer()) GTEST_SKIP() << "ThreadSanitizer ends a forked child with threads";
  const auto groups = make_thread_bootstraps(3, long_patience());
  expect_nothing_thrown(run_rank_processes(3, [&](const std::shared_ptr<Bootstrap>& bootstrap) {
    const auto check = [](bool holds, const char* what) {
      if (!holds) throw std::runtime_error(what);
    };
    const int rank = bootstrap->rank();
    auto heap = make_heap(*bootstrap, 10000);
    check(exchange(*bootstrap, *heap), "before");
    const std::vector<std::byte*> before(heap->peers().begin(), heap->peers().end());
    // As of a Buffer: a new rank makes its heap while the others admit it, by the same exchanges.
    BufferExchanges group(groups[static_cast<std::size_t>(rank)]);
    if (rank == 2) {
      heap = make_heap(group, 10000);
    } else {
      heap->admit(group, {false, false, true});
      check(std::ranges::equal(before, heap->peers()), "addresses");
    }
    std::fill_n(heap->local(), 300, std::byte{0});
    group.barrier();
    check(exchange(group, *heap), "afterwards");
  }));
}

void map_and_exchange(Bootstrap& bootstrap) {
  const auto heap = make_heap(bootstrap, 1 << 16);
  if (!exchange(bootstrap, *heap)) throw std::runtime_error("a heap is not that of its rank");
  heap->unmap_peers();
  bootstrap.barrier();
}

// As in containers: both ranks are process 1, of a namespace of their own.
TEST(HostHeap, ProcessesOfOtherPidNamespacesMapEachOther) {
  if (test::under_thread_sanitizer()) GTEST_SKIP() << "ThreadSanitizer ends a forked child with threads";
  if (!run_processes(1,
                     [](int) {
                       if (unshare(CLONE_NEWPID) != 0) throw std::runtime_error("not permitted");
                     })[0]
           .empty()) {
    GTEST_SKIP() << "this user may not make PID namespaces";
  }
  expect_nothing_thrown(run_rank_processes(2, [](const auto& bootstrap) {
    if (unshare(CLONE_NEWPID) != 0) throw std::runtime_error("unshare failed");
    const auto inside = run_processes(1, [&](int) {
      if (getpid() != 1) throw std::runtime_error("not the first process of its namespace");
      map_and_exchange(*bootstrap);
    });
    if (!inside[0].empty()) throw std::runtime_error(inside[0]);
  }));
}

}  // namespace
}  // namespace deep_ep::test
