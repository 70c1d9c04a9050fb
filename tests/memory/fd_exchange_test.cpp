#include "csrc/memory/fd_exchange.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
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
#include <functional>
#include <memory>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/bootstrap/buffer_exchanges.hpp"
#include "csrc/bootstrap/sockets.hpp"
#include "csrc/support/token.hpp"
#include "deep_ep/error.hpp"
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

/// As a rank tells it in its first exchange.
struct FdOffer {
  Token name = {}, secret = {};
};

/// As a part of what ranks do to make a buffer.
void exchange_and_agree(const std::shared_ptr<Bootstrap>& bootstrap, int fd, const std::vector<std::size_t>& partners) {
  BufferExchanges exchanges(bootstrap);
  exchanges.agree("it", [&] {
    exchange_fds(exchanges, fd, partners);
    exchanges.barrier();
  });
}

// Every rank gets everybody else's file, as a descriptor of its own; those below `known` not from each other.
void exchange_and_check(Bootstrap& bootstrap, int known = 0) {
  std::vector<std::size_t> partners;
  const auto is_partner = [&](int peer) {
    return peer != bootstrap.rank() && (peer >= known || bootstrap.rank() >= known);
  };
  for (int peer = 0; peer < bootstrap.size(); ++peer) {
    if (is_partner(peer)) partners.push_back(static_cast<std::size_t>(peer));
  }
  std::vector<UniqueFd> received;
  {
    const UniqueFd mine = file_that_says(1000 + bootstrap.rank());
    received = exchange_fds(bootstrap, mine.get(), partners);
  }
  for (int peer = 0; peer < bootstrap.size(); ++peer) {
    const UniqueFd& fd = received[static_cast<std::size_t>(peer)];
    if (!is_partner(peer)) {
      if (fd) throw std::runtime_error("a descriptor that was not to come");
    } else if (what_it_says(fd) != 1000 + peer) {
      throw std::runtime_error("the file of another rank");
    }
  }
}

/// The first rank closes its file as soon as it has the other one's.
TEST(FdExchange, AThreadThatIsLateStillGetsTheFile) {
  expect_ranks_succeed(2, [](const auto& bootstrap) {
    const auto late = make_callback_bootstrap(bootstrap->rank(), 2, [&](auto mine, auto all) {
      std::ranges::copy(bootstrap->all_gather(mine), all.begin());
      if (bootstrap->rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    });
    BufferExchanges exchanges(late);
    exchange_and_check(exchanges);
    exchanges.barrier();
  });
}

/// Sends rank 0 a file, as rank 1 does. 0: it is on its way.
int send_as_rank_1(const FdOffer& to) {
  const std::string text = "deep_ep-" + to_string(to.name);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(text.begin(), text.end(), address.sun_path + 1);
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), bytes) != 0) return 2;
  struct {
    Token secret;
    std::int64_t rank = 1;
  } says{to.secret};
  iovec data{.iov_base = &says, .iov_len = sizeof says};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const UniqueFd file = file_that_says(-1);
  const int fd = file.get();
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  return ::sendmsg(socket.get(), &message, MSG_NOSIGNAL) == sizeof says ? 0 : 3;
}

int another_user(const FdOffer& to) { return ::setresuid(65534, 65534, 65534) != 0 ? 1 : send_as_rank_1(to); }

int an_impostor(const FdOffer& to) { return send_as_rank_1({to.name, {}}); }

int one_that_says_nothing(const FdOffer& to) {
  const std::string text = "deep_ep-" + to_string(to.name);
  return call_at(unix_address(text)) ? 0 : 2;
}

/// Does something behind the exchanges.
class Watched final : public Bootstrap {
 public:
  using After = std::function<void(int calls, std::span<const std::byte> all)>;
  Watched(std::shared_ptr<Bootstrap> bootstrap, After after)
      : bootstrap_(std::move(bootstrap)), after_(std::move(after)) {}
  int rank() const override { return bootstrap_->rank(); }
  int size() const override { return bootstrap_->size(); }
  std::vector<std::byte> all_gather(std::span<const std::byte> mine) override {
    std::vector<std::byte> all = bootstrap_->all_gather(mine);
    after_(++calls_, all);
    return all;
  }

 private:
  std::shared_ptr<Bootstrap> bootstrap_;
  After after_;
  int calls_ = 0;
};
constexpr int kOffers = 1, kSent = 2;  // calls

/// Before rank 1 sends its descriptor a stranger has a go at rank 0.
void expect_no_notice_of(int (*stranger)(const FdOffer&)) {
  const auto errors = run_rank_processes(2, [&](const auto& bootstrap) {
    Watched watched(bootstrap, [&](int calls, std::span<const std::byte> all) {
      if (calls != kOffers || bootstrap->rank() == 0) return;
      FdOffer of_rank_0;
      std::memcpy(&of_rank_0, all.data(), sizeof of_rank_0);
      const pid_t child = test::fork_child();
      if (child == 0) ::_exit(stranger(of_rank_0));
      int status = -1;
      ::waitpid(child, &status, 0);
      if (status != 0) throw std::runtime_error("the stranger ended with " + std::to_string(status));
    });
    exchange_and_check(watched);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(FdExchange, FilesOfOtherUsersAreNotTaken) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  expect_no_notice_of(another_user);
}

TEST(FdExchange, FilesOfStrangersAreNotTaken) { expect_no_notice_of(an_impostor); }

TEST(FdExchange, AStrangerThatSaysNothingIsNotWaitedFor) { expect_no_notice_of(one_that_says_nothing); }

/// A process with as many open files as it may have says so.
TEST(FdExchange, ARankThatMayNotOpenMoreSaysSo) {
  const std::pair<int, const char*> texts[] = {
      {0, "taking a rank's call for a file descriptor: Too many open files"},
      {1, "no file descriptor of rank 1 has come (in this process too many may be open)"}};
  for (const auto& [more, text] : texts) {
    const auto errors = run_rank_processes(2, [more = more](const auto& bootstrap) {
      const UniqueFd mine = file_that_says(bootstrap->rank());
      const auto watched = std::make_shared<Watched>(bootstrap, [&](int calls, auto) {
        if (calls != kSent || bootstrap->rank() != 0) return;
        const auto most = static_cast<rlim_t>(UniqueFd(::dup(mine.get())).get() + more);
        const rlimit scarce{most, most};
        if (::setrlimit(RLIMIT_NOFILE, &scarce) != 0) throw std::runtime_error("setrlimit");
      });
      exchange_and_agree(watched, mine.get(), {bootstrap->rank() == 0 ? 1u : 0u});
    });
    EXPECT_NE(errors[0].find(text), std::string::npos) << errors[0];
    EXPECT_NE(errors[1], "");
  }
}

/// The system lets a user without root have as many descriptors under way as a process may open.
TEST(FdExchange, ManyRanksKeepFewUnderWay) {
  const auto errors = run_rank_processes(80, [](const auto& bootstrap) {
    const rlimit scarce{600, 600};
    if (::setrlimit(RLIMIT_NOFILE, &scarce) != 0) throw std::runtime_error("setrlimit");
    // A user of this run alone: descriptors under way count for all processes of a user.
    const auto user = static_cast<uid_t>(60000 + ::getppid() % 5000);
    if (::geteuid() == 0 && ::setresuid(user, user, user) != 0) throw std::runtime_error("setresuid");
    const auto open = [] {
      return std::ranges::count_if(std::views::iota(0, 600), [](int fd) { return ::fcntl(fd, F_GETFD) != -1; });
    };
    const auto before = open();
    for (const int known : {0, 0, 20, 20}) exchange_and_check(*bootstrap, known);
    if (open() != before) throw std::runtime_error("descriptors were left open");
  });
  expect_nothing_thrown(errors);
}

TEST(FdExchange, ARankThatCannotSendFailsEverybody) {
  const auto errors = run_rank_processes(3, [](const auto& bootstrap) {
    const std::vector<std::size_t> others[] = {{1, 2}, {0, 2}, {0, 1}};
    const int rank = bootstrap->rank();
    const UniqueFd mine = file_that_says(rank);
    exchange_and_agree(bootstrap, rank == 1 ? 9999 : mine.get(), others[static_cast<std::size_t>(rank)]);
  });
  for (const std::string& error : errors) EXPECT_NE(error, "");
  EXPECT_NE(errors[1].find("sending a file descriptor to rank 0: Bad file descriptor"), std::string::npos) << errors[1];
}

}  // namespace
}  // namespace deep_ep
