#include "csrc/memory/fd_exchange.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/exchanges.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/support/child_process.hpp"

namespace deep_ep {
namespace {

UniqueFd file_that_says(int value) {
  UniqueFd file(::memfd_create("deep_ep-test", MFD_CLOEXEC));
  if (!file || ::pwrite(file.get(), &value, sizeof(value), 0) != sizeof(value)) throw SystemError("no memfd");
  return file;
}

int what_it_says(const UniqueFd& file) {
  int value = -1;
  if (::pread(file.get(), &value, sizeof(value), 0) != sizeof(value)) throw SystemError("unreadable descriptor");
  return value;
}

int open_descriptors() {
  int count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

// Every rank gets everybody else's file, as a descriptor of its own.
void exchange_and_check(Bootstrap& bootstrap, int ranks_per_host = 100) {
  const auto host = [&](int rank) { return rank / ranks_per_host; };
  std::vector<bool> partners;
  for (int rank = 0; rank < bootstrap.size(); ++rank) partners.push_back(host(rank) == host(bootstrap.rank()));
  std::vector<UniqueFd> received;
  {
    const UniqueFd mine = file_that_says(1000 + bootstrap.rank());
    received = exchange_fds(bootstrap, mine.get(), partners, test::long_patience());
  }
  for (int peer = 0; peer < bootstrap.size(); ++peer) {
    const UniqueFd& fd = received[static_cast<std::size_t>(peer)];
    if (peer == bootstrap.rank() || host(peer) != host(bootstrap.rank())) {
      if (fd) throw std::runtime_error("a descriptor for this rank itself, or one of another host");
    } else if (what_it_says(fd) != 1000 + peer) {
      throw std::runtime_error("the file of another rank");
    }
  }
}

TEST(FdExchange, BetweenProcesses) {
  for (const int size : {2, 8}) {
    const auto errors = run_rank_processes(size, [](const auto& bootstrap) {
      const int before = open_descriptors();
      for (int round = 0; round < 5; ++round) exchange_and_check(*bootstrap);
      if (open_descriptors() != before) throw std::runtime_error("descriptors were left open");
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

TEST(FdExchange, OnlyWithinAHost) {
  const auto errors = run_rank_processes(5, [](const auto& bootstrap) { exchange_and_check(*bootstrap, 2); });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

/// The first rank closes its file as soon as it has the other one's.
TEST(FdExchange, AThreadThatIsLateStillGetsTheFile) {
  expect_ranks_succeed(2, [](const auto& bootstrap) {
    const auto late = make_callback_bootstrap(bootstrap->rank(), 2, [&](auto mine, auto all) {
      std::ranges::copy(bootstrap->all_gather(mine), all.begin());
      if (bootstrap->rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    });
    const auto exchanges = make_buffer_exchanges(late);
    exchange_and_check(*exchanges);
    exchanges->barrier();
  });
}

/// Connects to the socket of that name. 0: whoever listens there hung up.
int connect_and_say(const std::array<std::uint64_t, 2>& name, std::span<const std::byte> says) {
  const std::string text = fmt::format("deep_ep-{:016x}{:016x}", name[0], name[1]);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(text.begin(), text.end(), address.sun_path + 1);
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), bytes) != 0) return 2;
  if (!says.empty() && ::send(socket.get(), says.data(), says.size(), MSG_NOSIGNAL) < 0) return 4;
  pollfd end{.fd = socket.get(), .events = POLLIN, .revents = 0};
  char byte = 0;
  return ::poll(&end, 1, 5000) == 1 && ::recv(socket.get(), &byte, 1, 0) == 0 ? 0 : 3;
}

int another_user(const std::array<std::uint64_t, 2>& name) {
  return ::setresuid(65534, 65534, 65534) != 0 ? 1 : connect_and_say(name, {});
}

/// Says that it is rank 1, but does not know the secret.
int an_impostor(const std::array<std::uint64_t, 2>& name) {
  const struct {
    std::array<std::uint64_t, 2> secret{};
    std::int32_t rank = 1, padding = 0;
  } request;
  return connect_and_say(name, std::as_bytes(std::span(&request, 1)));
}

/// A rank that, between offering its descriptor and asking for those of others, lets a stranger have a go at rank 0.
class WithAStranger final : public Bootstrap {
 public:
  using Stranger = int(const std::array<std::uint64_t, 2>& name);
  WithAStranger(std::shared_ptr<Bootstrap> bootstrap, Stranger* stranger)
      : bootstrap_(std::move(bootstrap)), stranger_(stranger) {}
  int rank() const override { return bootstrap_->rank(); }
  int size() const override { return bootstrap_->size(); }
  std::vector<std::byte> all_gather(std::span<const std::byte> mine) override {
    std::vector<std::byte> all = bootstrap_->all_gather(mine);
    if (++calls_ == 2) {  // that of the offers, which begin with the name of the socket
      std::array<std::uint64_t, 2> name{};
      std::memcpy(name.data(), all.data(), sizeof(name));
      const pid_t child = test::fork_child();
      if (child == 0) ::_exit(stranger_(name));
      ::waitpid(child, &status_, 0);
    }
    return all;
  }
  int status() const { return WIFEXITED(status_) ? WEXITSTATUS(status_) : -1; }

 private:
  std::shared_ptr<Bootstrap> bootstrap_;
  Stranger* stranger_;
  int calls_ = 0;
  int status_ = -1;
};

void expect_hung_up_on(WithAStranger::Stranger* stranger) {
  const auto errors = run_rank_processes(2, [&](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    const std::vector<bool> all(2, true);
    const UniqueFd mine = file_that_says(rank);
    if (rank == 0) {
      exchange_fds(*bootstrap, mine.get(), all, test::long_patience());
    } else {
      WithAStranger with_a_stranger(bootstrap, stranger);
      exchange_fds(with_a_stranger, mine.get(), all, test::long_patience());
      const int status = with_a_stranger.status();
      if (status != 0) throw std::runtime_error("the stranger ended with " + std::to_string(status));
    }
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(FdExchange, OtherUsersAreHungUpOn) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  expect_hung_up_on(another_user);
}

TEST(FdExchange, WhoDoesNotKnowTheSecretIsHungUpOn) { expect_hung_up_on(an_impostor); }

/// A process with as many open files as it may have: it says so, instead of asking the system again until the deadline.
TEST(FdExchange, ARankThatMayNotTakeACallSaysSo) {
  const auto errors = run_rank_processes(2, [](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    const UniqueFd mine = file_that_says(rank);
    if (rank == 0) {
      const int next = UniqueFd(::dup(mine.get())).get();
      const rlimit scarce{static_cast<rlim_t>(next) + 2, static_cast<rlim_t>(next) + 2};  // to listen, and to call
      if (::setrlimit(RLIMIT_NOFILE, &scarce) != 0) throw std::runtime_error("setrlimit");
    }
    exchange_fds(*bootstrap, mine.get(), {true, true}, test::long_patience());
  });
  EXPECT_NE(errors[0].find("taking a rank's call for a file descriptor: Too many open files"), std::string::npos)
      << errors[0];
  EXPECT_NE(errors[1], "");
}

TEST(FdExchange, ARankThatCannotOfferFailsEverybody) {
  const auto errors = run_rank_processes(3, [](const auto& bootstrap) {
    const int rank = bootstrap->rank();
    const UniqueFd mine = file_that_says(rank);
    exchange_fds(*bootstrap, rank == 1 ? 9999 : mine.get(), {true, true, true}, 1);
  });
  for (const std::string& error : errors) EXPECT_NE(error, "");
  EXPECT_NE(errors[1].find("sending a file descriptor"), std::string::npos) << errors[1];
}

}  // namespace
}  // namespace deep_ep
