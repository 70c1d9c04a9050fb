// Names and ports, on loopback alone.
#include "tools/doctor/reach.hpp"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "csrc/support/unique_fd.hpp"

namespace deep_ep::tools {
namespace {

/// A socket that is bound to a free port of loopback, and listens if asked to.
class Port {
 public:
  explicit Port(bool listens) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    ::sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ::socklen_t size = sizeof address;
    EXPECT_EQ(::bind(socket_.get(), reinterpret_cast<::sockaddr*>(&address), size), 0);
    EXPECT_EQ(::getsockname(socket_.get(), reinterpret_cast<::sockaddr*>(&address), &size), 0);
    if (listens) {
      EXPECT_EQ(::listen(socket_.get(), 4), 0);
    }
    number_ = ntohs(address.sin_port);
  }
  std::string text() const { return std::to_string(number_); }

 private:
  UniqueFd socket_;
  int number_ = 0;
};

TEST(Reach, PortsThatAnswerAndThatDoNot) {
  const Port open(true);
  const Reach reached = try_to_reach("127.0.0.1", open.text(), 30);
  EXPECT_EQ(reached.outcome, Reach::Outcome::reached);
  EXPECT_EQ(reached.address, "127.0.0.1");
  const Port closed(false);
  EXPECT_EQ(try_to_reach("127.0.0.1", closed.text(), 30).outcome, Reach::Outcome::refused);
}

TEST(Reach, NamesThatMeanNothing) {
  const Reach reach = try_to_reach("no such name", "29500", 30);
  EXPECT_EQ(reach.outcome, Reach::Outcome::unknown_name);
  EXPECT_FALSE(reach.problem.empty());
  EXPECT_EQ(try_to_reach("127.0.0.1", "no-such-port", 30).outcome, Reach::Outcome::unknown_name);
}

}  // namespace
}  // namespace deep_ep::tools
