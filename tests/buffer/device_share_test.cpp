#include "csrc/buffer/options.hpp"

#include <gtest/gtest.h>

namespace deep_ep {
namespace {

constexpr DeviceIdentity gpu(std::uint8_t number) { return {.uuid = {number}, .multiprocessors = 132}; }

int sms_of(int of_context, const DeviceIdentity& mine, const std::vector<DeviceIdentity>& all) {
  return share_device({.multiprocessors = of_context}, mine, all).multiprocessors;
}

TEST(DeviceShareTest, AGpuOfOnesOwnIsNotShared) { EXPECT_EQ(sms_of(132, gpu(1), {gpu(1), gpu(2)}), 132); }

TEST(DeviceShareTest, RanksOfAGpuHaveEqualParts) {
  EXPECT_EQ(sms_of(132, gpu(1), {gpu(1), gpu(2), gpu(1), gpu(2)}), 58);
  // Contexts of CUDA MPS may have more, or less.
  EXPECT_EQ(sms_of(32, gpu(1), {gpu(1), gpu(1), gpu(1), gpu(1)}), 29);
  EXPECT_EQ(sms_of(20, gpu(1), {gpu(1), gpu(1), gpu(1), gpu(1)}), 20);
  EXPECT_EQ(sms_of(132, gpu(1), std::vector<DeviceIdentity>(200, gpu(1))), 1);
}

TEST(DeviceShareTest, KernelsThatPlayNicsFindAPlace) {
  DeviceIdentity mine = gpu(1);
  mine.kept = 2;
  EXPECT_EQ(sms_of(130, mine, {mine}), 130);
  EXPECT_EQ(sms_of(130, mine, {mine, mine}), 56);
}

TEST(DeviceShareTest, RanksOnCpusAreScheduledByTheSystem) { EXPECT_EQ(sms_of(4, {}, {{}, {}, {}}), 4); }

}  // namespace
}  // namespace deep_ep
