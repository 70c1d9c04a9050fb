#include "csrc/executor/driver_version.hpp"

#include <gtest/gtest.h>

namespace deep_ep::cuda {
namespace {

TEST(DriverVersion, AnOlderMajorReleaseIsRefusedWithWhatToDo) {
  // Driver 575 knows CUDA 12.9.
  EXPECT_EQ(
      driver_refusal(12090, 13000),
      "the NVIDIA driver knows CUDA 12.9 at most, and this build of the library is of CUDA 13.0: update the driver "
      "to 580 or later, or put NVIDIA's package cuda-compat-13-0 on the loader's path, or build the library with "
      "CUDA 12");
  EXPECT_NE(driver_refusal(11080, 12080).find("update the driver to 525 or later"), std::string::npos);
}

TEST(DriverVersion, TheSameOrALaterMajorReleaseRuns) {
  EXPECT_EQ(driver_refusal(13000, 13000), "");
  EXPECT_EQ(driver_refusal(13000, 13020), "");  // an older driver of the same release
  EXPECT_EQ(driver_refusal(14010, 13000), "");
}

TEST(DriverVersion, WithoutADriverNothingIsSaid) { EXPECT_EQ(driver_refusal(0, 13000), ""); }

}  // namespace
}  // namespace deep_ep::cuda
