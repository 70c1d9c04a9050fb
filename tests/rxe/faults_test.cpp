// What goes wrong on real RoCE devices, and how the verbs wire reports it.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "csrc/support/deadline.hpp"
#include "deep_ep/error.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/rxe/ends.hpp"
#include "tests/support/child_process.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::rdma::verbs::test {
namespace {

const Cable kCable{"ipv4", "rxe0", "rxe1", 1};

using deep_ep::test::contains;
using deep_ep::test::message_of;

// One operation that fails in the middle of others: it alone reports the cause; what follows is flushed, signalled or
// not, and the queue pair stays in that state.
void expect_failure(Ends& ends, const WireOperation& bad, Syndrome syndrome) {
  std::array operations{ends.write(1, 0, 0, 64), bad, ends.write(3, 0, 0, 64), ends.fetch_add(4, 4096, 1)};
  for (WireOperation& operation : operations) operation.signalled = false;
  const auto completions = run(ends.first.wire(), operations, 3);
  ASSERT_EQ(completions.size(), 3U);
  EXPECT_EQ(completions[0].id, 2U);
  EXPECT_EQ(completions[0].syndrome, syndrome) << text(completions[0].syndrome);
  EXPECT_EQ(completions[1].id, 3U);
  EXPECT_EQ(completions[1].syndrome, Syndrome::flushed);
  EXPECT_EQ(completions[2].id, 4U);
  EXPECT_EQ(completions[2].syndrome, Syndrome::flushed);

  const auto later = run(ends.first.wire(), std::array{ends.write(5, 0, 0, 64)}, 1);
  EXPECT_EQ(later[0].id, 5U);
  EXPECT_EQ(later[0].syndrome, Syndrome::flushed);
}

TEST(RxeFault, WrongRemoteKey) {
  Ends ends(kCable);
  WireOperation bad = ends.write(2, 0, 0, 64);
  bad.remote_key ^= 1;
  expect_failure(ends, bad, Syndrome::remote_access);
}

TEST(RxeFault, BytesBehindTheRegisteredMemory) {
  Ends ends(kCable, {.bytes = 65536});
  expect_failure(ends, ends.write(2, 0, 65536 - 32, 64), Syndrome::remote_access);
}

// mlx5 devices ask the peer, who refuses; soft-RoCE refuses to post it.
TEST(RxeFault, AtomicAtAnOddAddress) {
  Ends ends(kCable);
  const std::string message =
      message_of<SystemError>([&] { ends.first.wire().post(std::array{ends.fetch_add(2, 4100, 1)}); });
  EXPECT_TRUE(contains(message, "RDMA device rxe0: ibv_post_send to queue pair")) << message;
}

// mlx5 devices call it a protection error.
TEST(RxeFault, WrongLocalKey) {
  Ends ends(kCable);
  WireOperation bad = ends.write(2, 0, 0, 64);
  bad.local_key ^= 0x100;
  expect_failure(ends, bad, Syndrome::local_queue_pair);
}

TEST(RxeFault, BytesBehindTheLocalMemory) {
  Ends ends(kCable, {.bytes = 65536});
  expect_failure(ends, ends.write(2, 65536 - 32, 0, 64), Syndrome::local_protection);
}

TEST(RxeFault, OtherQueuePairsOfTheWireGoOn) {
  Ends ends(kCable, {.queue_pairs = 2});
  WireOperation bad = ends.write(1, 0, 0, 64);
  bad.remote_key ^= 1;
  EXPECT_EQ(run(ends.first.wire(), std::array{bad}, 1)[0].syndrome, Syndrome::remote_access);
  WireOperation good = ends.write(2, 0, 0, 64);
  good.queue_pair = ends.first.pair(1).number();
  EXPECT_EQ(run(ends.first.wire(), std::array{good}, 1)[0].syndrome, Syndrome::none);
}

// The peer is a process of its own, killed while writes to it are under way.
TEST(RxeFault, PeerProcessIsKilled) {
  struct Greeting {
    QueuePairAddress address;
    std::uint32_t key;
  };
  int up[2];
  int down[2];
  ASSERT_EQ(::pipe(up), 0);
  ASSERT_EQ(::pipe(down), 0);
  const pid_t child = deep_ep::test::fork_child();
  ASSERT_GE(child, 0);
  if (child == 0) {
    End end("rxe1", 65536, 1, 16, quick_path(1));
    Greeting greeting{end.pair(0).address(), end.remote_key()};
    QueuePairAddress peer;
    const bool greeted = ::write(up[1], &greeting, sizeof(greeting)) == sizeof(greeting) &&
                         ::read(down[0], &peer, sizeof(peer)) == sizeof(peer);
    if (!greeted) ::_exit(1);
    end.pair(0).connect(peer);
    if (::write(up[1], "c", 1) != 1) ::_exit(1);
    while (true) ::pause();
  }
  End end("rxe0", 65536, 1, 16, quick_path(1));
  Greeting greeting;
  ASSERT_EQ(::read(up[0], &greeting, sizeof(greeting)), static_cast<ssize_t>(sizeof(greeting)));
  ASSERT_EQ(::write(down[1], &end.pair(0).address(), sizeof(QueuePairAddress)),
            static_cast<ssize_t>(sizeof(QueuePairAddress)));
  end.pair(0).connect(greeting.address);
  char connected = 0;
  ASSERT_EQ(::read(up[0], &connected, 1), 1);

  WireOperation operation{.queue_pair = end.pair(0).number(),
                          .id = 1,
                          .signalled = true,
                          .length = 4096,
                          .local_key = end.local_key(),
                          .remote_key = greeting.key};
  ASSERT_EQ(run(end.wire(), std::array{operation}, 1)[0].syndrome, Syndrome::none);
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  operation.id = 2;
  const auto completions = run(end.wire(), std::array{operation}, 1);
  EXPECT_EQ(completions[0].syndrome, Syndrome::transport_retries_exceeded) << text(completions[0].syndrome);
  for (const int descriptor : {up[0], up[1], down[0], down[1]}) ::close(descriptor);
}

TEST(RxeFault, NoSuchDeviceListsThoseThatExist) {
  const std::string message = message_of<InvalidArgument>([] { Device::open("mlx5_7"); });
  EXPECT_TRUE(contains(message, "'mlx5_7'") && contains(message, "rxe0, rxe1")) << message;
}

TEST(RxeFault, EmptyGidIndex) {
  const std::string message = message_of<InvalidArgument>([] { End("rxe0", 4096, 1, 16, quick_path(9)); });
  EXPECT_TRUE(contains(message, "GID index 9 of RDMA device rxe0 port 1 is empty")) << message;
}

TEST(RxeFault, PortThatDoesNotExist) {
  PathOptions path = quick_path(1);
  path.port = 2;
  const std::string message = message_of<SystemError>([&] { End("rxe0", 4096, 1, 16, path); });
  EXPECT_TRUE(contains(message, "rxe0 port 2: ibv_query_port")) << message;
}

TEST(RxeFault, IPv4AgainstIPv6) {
  End first("rxe0", 4096, 1, 16, quick_path(1));
  End second("rxe1", 4096, 1, 16, quick_path(0));
  const std::string message = message_of<RankMismatch>([&] { first.pair(0).connect(second.pair(0).address()); });
  EXPECT_TRUE(contains(message, "10.1.0.1") && contains(message, "different families")) << message;
}

TEST(RxeFault, AddressWithoutRoute) {
  End first("rxe0", 4096, 1, 16, quick_path(1));
  QueuePairAddress nowhere = first.pair(0).address();
  nowhere.gid[12] = 192;  // 192.1.0.1
  const std::string message = message_of<SystemError>([&] { first.pair(0).connect(nowhere); });
  EXPECT_TRUE(contains(message, "ibv_modify_qp") && contains(message, "to RTR") && contains(message, "192.1.0.1"))
      << message;
}

TEST(RxeFault, MemoryThatIsNotMapped) {
  void* address = ::mmap(nullptr, 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(address, MAP_FAILED);
  auto device = Device::open("rxe0");
  const std::string message =
      message_of<SystemError>([&] { Registration::of_host_memory(device, {.address = address, .bytes = 8192}); });
  EXPECT_TRUE(contains(message, "rxe0: ibv_reg_mr of 8.00 KiB of CPU memory")) << message;
  ::munmap(address, 8192);
}

// No GPU here, but the kernel's refusal of a descriptor that is no dma-buf is real, and so is the second attempt.
TEST(RxeFault, MemoryIsTriedByAddressAfterItsDmaBufWasRefused) {
  auto device = Device::open("rxe0");
  const auto exporter = [](void*, std::size_t bytes) {
    UniqueFd file(::memfd_create("no dma-buf", MFD_CLOEXEC));
    EXPECT_EQ(::ftruncate(file.get(), static_cast<off_t>(bytes)), 0);
    return file;
  };
  alignas(4096) static std::byte memory[4096];
  const Registration registration =
      Registration::of_gpu_memory(device, {.address = memory, .bytes = sizeof(memory)}, exporter);
  EXPECT_EQ(registration.path(), RegistrationPath::peer_memory);

  void* unmapped = ::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const std::string message = message_of<SystemError>(
      [&] { Registration::of_gpu_memory(device, {.address = unmapped, .bytes = 4096}, exporter); });
  EXPECT_TRUE(contains(message, "Tried: dma-buf: ibv_reg_dmabuf_mr: ") &&
              contains(message, "peer memory: ibv_reg_mr: ") && contains(message, "nvidia-peermem is not loaded"))
      << message;
  ::munmap(unmapped, 4096);
}

// The cable's far end goes down. These tests come last: addresses and routes suffer.
class RxeLink : public testing::Test {
 protected:
  static void shell(const std::string& command) {
    ASSERT_EQ(std::system(("bash -c '. /guest/guest_network.sh; " + command + "'").c_str()), 0) << command;
  }
};

TEST_F(RxeLink, ShortLossOfTheLinkIsSurvived) {
  PathOptions path = quick_path(1);
  path.ack_timeout = 18;  // 7.5 s until it would give up
  Ends ends(kCable, {}, path);
  fill_pattern(ends.first.memory().first(65536), 9);
  shell("ip link set v1 down");
  std::thread repair([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    shell("cable_up");
  });
  const auto completions = run(ends.first.wire(), std::array{ends.write(1, 0, 0, 65536)}, 1);
  repair.join();
  EXPECT_EQ(completions[0].syndrome, Syndrome::none) << text(completions[0].syndrome);
  EXPECT_EQ(std::memcmp(ends.second.memory().data(), ends.first.memory().data(), 65536), 0);
}

TEST_F(RxeLink, LinkThatStaysDownEndsInRetriesExceededAndAnEvent) {
  std::mutex mutex;
  std::vector<AsyncEvent> events;
  Ends ends(kCable, {}, quick_path(1));
  {
    AsyncEventWatcher watcher(Device::open("rxe1"), [&](const AsyncEvent& event) {
      const std::lock_guard lock(mutex);
      events.push_back(event);
    });
    shell("ip link set v1 down");
    const auto completions = run(ends.first.wire(), std::array{ends.write(1, 0, 0, 4096)}, 1);
    EXPECT_EQ(completions[0].syndrome, Syndrome::transport_retries_exceeded) << text(completions[0].syndrome);

    const std::string message = message_of<SystemError>([] { End("rxe1", 4096, 1, 16, quick_path(1)); });
    EXPECT_TRUE(contains(message, "rxe1 port 1 is DOWN, not ACTIVE")) << message;
    shell("cable_up");
    const Deadline deadline(deep_ep::test::long_patience());
    while (!deadline.expired()) {
      const std::lock_guard lock(mutex);
      if (!events.empty() && events.back().kind == AsyncEventKind::port_active) break;
    }
  }
  ASSERT_GE(events.size(), 2U);
  EXPECT_EQ(events.front().kind, AsyncEventKind::port_error);
  EXPECT_EQ(events.front().port, 1);
  EXPECT_TRUE(contains(events.front().text, "RDMA device rxe1: port error, port 1")) << events.front().text;
  EXPECT_EQ(events.back().kind, AsyncEventKind::port_active);

  // A new connection over the repaired cable works.
  Ends again(kCable);
  EXPECT_EQ(run(again.first.wire(), std::array{again.write(1, 0, 0, 4096)}, 1)[0].syndrome, Syndrome::none);
}

}  // namespace
}  // namespace deep_ep::rdma::verbs::test
