// What the doctor asks of libnvidia-ml, of a library that stands in for it.
#include "tools/doctor/nvml.hpp"

#include <gtest/gtest.h>

namespace deep_ep::tools {
namespace {

TEST(Nvml, TellsMemoryLinksAndTheDomain) {
  const auto gpus = ask_nvml(DEEP_EP_NVML_STUB);
  ASSERT_TRUE(gpus);
  ASSERT_EQ(gpus->size(), 2u);
  const LiveGpu& second = (*gpus)[1];
  EXPECT_EQ(second.pci, "0000:1b:00.0");
  EXPECT_EQ(second.memory_bytes, 192'000'000'000u);
  EXPECT_EQ((*gpus)[0].links, 4);
  EXPECT_EQ(second.links, 3);
  ASSERT_TRUE(second.fabric);
  EXPECT_EQ(second.fabric->text(), "10111213-1415-1617-1819-1a1b1c1d1e1f, clique 7");
  EXPECT_EQ(second.fabric->state, NvLinkFabric::State::completed);
}

TEST(Nvml, OtherLibrariesAreNotTakenForIt) {
  EXPECT_FALSE(ask_nvml("libm.so.6"));
  EXPECT_FALSE(ask_nvml("/no/such/library.so"));
}

}  // namespace
}  // namespace deep_ep::tools
