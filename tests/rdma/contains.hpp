// EXPECT_TRUE(contains(text, part)), which shows the text when the part is missing.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace deep_ep::test {

inline testing::AssertionResult contains(std::string_view text, std::string_view part) {
  if (text.find(part) != std::string_view::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << text << "' does not contain '" << part << "'";
}

}  // namespace deep_ep::test
