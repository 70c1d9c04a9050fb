// What the doctor asks of libnvidia-ml, of a library that stands in for it.
#include "tools/doctor/nvml.hpp"

#include <gtest/gtest.h>

namespace deep_ep::tools {
namespace {

TEST(Nvml, TellsMemoryAndLinks) {
  const auto gpus = ask_nvml(DEEP_EP_NVML_STUB);
  ASSERT_TRUE(gpus);
  ASSERT_EQ(gpus->size(), 2u);
  const LiveGpu& second = (*gpus)[1];
  EXPECT_EQ(second.pci, "0000:1b:00.0");
  EXPECT_EQ(second.name, "NVIDIA B200");
  EXPECT_EQ(second.memory_bytes, 192'000'000'000u);
  EXPECT_EQ(second.free_bytes, 189'999'999'999u);
  EXPECT_EQ(second.capability, 100);
  EXPECT_EQ((*gpus)[0].links, 4);
  EXPECT_EQ(second.links, 3);
  EXPECT_EQ(second.links_down, 1);
}

TEST(Nvml, TellsPairsAndTheDomain) {
  const auto gpus = ask_nvml(DEEP_EP_NVML_STUB);
  ASSERT_TRUE(gpus);
  const LiveGpu& first = (*gpus)[0];
  EXPECT_EQ(first.reaches, (std::vector<std::optional<bool>>{std::nullopt, true}));
  EXPECT_EQ((*gpus)[1].reaches, (std::vector<std::optional<bool>>{std::nullopt, std::nullopt}));
  EXPECT_EQ(count_pairs(*gpus).known, 1u);
  EXPECT_EQ(nvlink_table(*gpus),
            "\nNVLink between GPUs (+ reached, - not reached, ? not known)\n       0  1\n   0   .  +\n   1   ?  .\n");
  ASSERT_TRUE(first.fabric);
  EXPECT_EQ(first.fabric->text(), "10111213-1415-1617-1819-1a1b1c1d1e1f, clique 7");
  EXPECT_EQ(first.fabric->state, NvLinkFabric::State::completed);
  EXPECT_FALSE(first.fabric->slow_links);
  EXPECT_TRUE((*gpus)[1].fabric->slow_links);
}

TEST(Nvml, OtherLibrariesAreNotTakenForIt) {
  EXPECT_FALSE(ask_nvml("libm.so.6"));
  EXPECT_FALSE(ask_nvml("/no/such/library.so"));
}

}  // namespace
}  // namespace deep_ep::tools
