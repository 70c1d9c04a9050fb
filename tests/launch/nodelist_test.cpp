#include "tools/launch/nodelist.hpp"

#include <gtest/gtest.h>

#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

std::vector<std::string> expand(std::string_view text) { return expand_nodelist("SLURM_JOB_NODELIST", text); }

using Names = std::vector<std::string>;

TEST(Nodelist, NamesWithoutBracketsAreThemselves) {
  EXPECT_EQ(expand("login"), Names({"login"}));
  EXPECT_EQ(expand("a-1,b.example.org, c"), Names({"a-1", "b.example.org", "c"}));
}

TEST(Nodelist, RangesKeepTheirOrderAndTheirZeros) {
  EXPECT_EQ(expand("gpu[1-3]"), Names({"gpu1", "gpu2", "gpu3"}));
  EXPECT_EQ(expand("gpu[7,08-11]"), Names({"gpu7", "gpu08", "gpu09", "gpu10", "gpu11"}));
  EXPECT_EQ(expand("gpu[009-010]-ib,x"), Names({"gpu009-ib", "gpu010-ib", "x"}));
}

TEST(Nodelist, SeveralBracketsMakeAllCombinations) {
  EXPECT_EQ(expand("r[1-2]n[01,03]"), Names({"r1n01", "r1n03", "r2n01", "r2n03"}));
}

TEST(Nodelist, TheFirstOfManyIsTheFirst) {
  const Names names = expand("n[0500-1499]");
  ASSERT_EQ(names.size(), 1000U);
  EXPECT_EQ(names.front(), "n0500");
  EXPECT_EQ(names.back(), "n1499");
}

TEST(Nodelist, WhatIsNoListIsRefusedAndNamed) {
  for (const char* text : {"", "a,", "a[", "a]", "a[]", "a[1-]", "a[-2]", "a[3-1]", "a[x]", "a[1-2", "a[[1]]", "a[1,]",
                           "a[0-99999999]", "a[0-999]b[0-999]"}) {
    try {
      expand(text);
      ADD_FAILURE() << text;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("SLURM_JOB_NODELIST='" + std::string(text)), std::string::npos)
          << error.what();
    }
  }
}

}  // namespace
}  // namespace deep_ep::tools
