#include "tools/launch/hostfile.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <optional>

#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

/// A file that is gone when the test is over.
class File {
 public:
  explicit File(const std::string& text) {
    const int fd = ::mkstemp(path_.data());
    ::close(fd);
    std::ofstream(path_) << text;
  }
  ~File() { std::remove(path_.c_str()); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_ = "/tmp/deep_ep_hosts_XXXXXX";
};

std::string names(const std::vector<Host>& hosts) {
  std::string text;
  for (const Host& host : hosts) text += host.name + " ";
  return text;
}

template <class Action>
std::string refusal(Action&& action) {
  try {
    action();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Hostfile, NamesSlotsAndTopology) {
  const File file("# hosts\na slots=2 # two\n\nme@b topology=x/1/b slots=128\n  c\n");
  const std::vector<Host> hosts = read_hosts(file.path(), "");
  ASSERT_EQ(names(hosts), "a me@b c ");
  EXPECT_EQ(hosts[0].ranks, 2);
  EXPECT_EQ(hosts[1].ranks, 128);
  EXPECT_EQ(hosts[1].topology, "x/1/b");
  EXPECT_EQ(hosts[2].ranks, 0);
}

TEST(Hostfile, ARangeSelects) {
  const File file("a\n# no host\nb\nc\nd\n");
  EXPECT_EQ(names(read_hosts(file.path(), "2:3")), "b c ");
  EXPECT_EQ(names(read_hosts(file.path(), "3:")), "c d ");
  EXPECT_EQ(names(read_hosts(file.path(), ":2")), "a b ");
  EXPECT_EQ(names(read_hosts(file.path(), "4")), "d ");
  for (const char* range : {"0:2", "3:2", "1:5", "x", "1:2:3", "-1:2"}) {
    EXPECT_EQ(refusal([&] { read_hosts(file.path(), range); }),
              "--range " + std::string(range) + ", allowed: FROM:TO, numbers of the 4 hosts from 1 on");
  }
}

TEST(Hostfile, WhatIsNoLineIsQuoted) {
  for (const char* line :
       {"a slots=0", "a slots=129", "a slots=x", "a slots=", "a ranks=2", "a b", "-oProxyCommand=x", "a topology="}) {
    const File file(std::string("good\n") + line + "\n");
    EXPECT_NE(refusal([&] { read_hosts(file.path(), ""); }).find("'" + std::string(line) + "', allowed: HOST"),
              std::string::npos)
        << line;
  }
}

TEST(Hostfile, LabelsOfAFileOfTheirOwn) {
  const File hosts_file("a\nb\n");
  std::vector<Host> hosts = read_hosts(hosts_file.path(), "");
  const File labels("b /x/2/b\na /x/1/a # first\nother y\n");
  read_topology(labels.path(), hosts);
  EXPECT_EQ(hosts[0].topology, "/x/1/a");
  EXPECT_EQ(hosts[1].topology, "/x/2/b");
  const File incomplete("a x\n");
  EXPECT_NE(refusal([&] { read_topology(incomplete.path(), hosts); }).find("there is no line for b"),
            std::string::npos);
  const File wrong("a x y\n");
  EXPECT_NE(refusal([&] { read_topology(wrong.path(), hosts); }).find("'a x y', allowed: HOST LABEL"),
            std::string::npos);
}

std::vector<int> order(const std::vector<std::string>& labels) {
  return near_order(labels, std::vector<std::string>(labels.size(), "node"));
}
using Order = std::vector<int>;

TEST(NearOrder, NeighboursAreNearAndTheFirstStays) {
  EXPECT_EQ(order({"", "", ""}), Order({0, 1, 2}));
  // Block, subblock, host: the first node's subblock, then its block, then the other.
  EXPECT_EQ(order({"/b/2/h1", "/a/1/h2", "/b/1/h3", "/b/2/h4", "/a/1/h5"}), Order({0, 3, 2, 1, 4}));
  // Equal labels keep the order in which they came.
  EXPECT_EQ(order({"x", "y", "x", "y", "x"}), Order({0, 2, 4, 1, 3}));
  // The parts are compared, not the letters between them.
  EXPECT_EQ(order({"a/1", "a-b/1", "a/2"}), Order({0, 2, 1}));
}

TEST(NearOrder, AllOrNone) {
  EXPECT_EQ(refusal([] {
              near_order(std::vector<std::string>{"a", "", "b"}, std::vector<std::string>{"x", "y", "z"});
            }),
            "y has no topology label, but others have one");
}

}  // namespace
}  // namespace deep_ep::tools
