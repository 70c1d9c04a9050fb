// Environment variables, looked at before a command works for long.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/support/environment.hpp"

namespace deep_ep::tools {

/// The value of a variable of the table, as Reader::value(); a text is judged by what reads it.
environment::Value value_of(environment::Reader& reader, std::string_view name);

/// Throws InvalidArgument where a variable of the library's own has a wrong value, also one that this run does not
/// read. Names without a reader are warned of.
void check_environment();

/// A variable that is set, but has no reader: misspelt, or of another version.
struct UnknownVariable {
  std::string name;
  std::string_view nearest;  ///< of the library's own names
};
/// Of `names`, those that begin with DEEP_EP_ and are not in the library's table. DEEP_EP_TEST_... belongs to the
/// tests.
std::vector<UnknownVariable> unknown_of(std::span<const std::string> names);
/// Of the variables that are set in this process.
std::vector<std::string> names_of_process();

}  // namespace deep_ep::tools
