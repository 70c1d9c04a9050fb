// The library's table of environment variables, for bindings to other languages: `deep_ep env` prints it.
#pragma once
// SPDX-License-Identifier: MIT

#include <cstdint>
#include <string>
#include <string_view>

#include "deep_ep/standard.hpp"

namespace deep_ep {

/// The value of a variable that holds a number without a sign, or its default.
/// @param name a variable of the table with that type; std::logic_error for another name.
/// InvalidArgument, which names the allowed values, if the variable is set to anything else.
std::uint64_t environment_number(std::string_view name);

/// The same for a variable of any type, as text.
/// @param name a variable of the table, as for environment_number.
std::string environment_text(std::string_view name);

}  // namespace deep_ep
