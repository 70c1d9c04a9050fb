#include "csrc/memory/fd_exchange.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace deep_ep {
namespace {

TEST(SealedMemory, NobodyCanChangeItsSize) {
  const UniqueFd fd = make_sealed_memory("deep_ep_test", 8192);
  struct stat status {};
  ASSERT_EQ(::fstat(fd.get(), &status), 0);
  EXPECT_EQ(status.st_size, 8192);
  for (const off_t size : {0, 4096, 16384}) {
    EXPECT_EQ(::ftruncate(fd.get(), size), -1) << size;
    EXPECT_EQ(errno, EPERM);
  }
  EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE), -1) << "nor make it read-only";
  const char byte = 1;
  EXPECT_EQ(::pwrite(fd.get(), &byte, 1, 8191), 1);
}

}  // namespace
}  // namespace deep_ep
