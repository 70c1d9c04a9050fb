// The environment of a process that exists in a test only.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "csrc/support/environment.hpp"

namespace deep_ep {

using Variables = std::map<std::string, std::string, std::less<>>;

inline environment::Source source_of(Variables variables) {
  return [variables = std::move(variables)](std::string_view name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

}  // namespace deep_ep
