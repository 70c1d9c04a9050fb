// What errors say, for tests: EXPECT_TRUE(says(message_of<SystemError>([&] { open(); }), {"mlx5_0",
// "ibv_open_device"})).
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <string_view>

namespace deep_ep::test {

/// The text of the E that `function` throws; a failed test if it throws none.
template <class E, class Function>
std::string message_of(Function function) {
  try {
    function();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing of the expected type was thrown";
  return {};
}

inline testing::AssertionResult says(std::string_view message, std::initializer_list<std::string_view> parts) {
  for (const std::string_view part : parts) {
    if (message.find(part) == std::string_view::npos) {
      return testing::AssertionFailure() << "no '" << part << "' in: " << message;
    }
  }
  return testing::AssertionSuccess();
}

inline testing::AssertionResult contains(std::string_view message, std::string_view part) {
  return says(message, {part});
}

}  // namespace deep_ep::test
