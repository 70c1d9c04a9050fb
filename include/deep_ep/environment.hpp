// The library's table of environment variables, for bindings to other languages: `deep_ep env` prints it.
#pragma once
// SPDX-License-Identifier: MIT

#include <string>
#include <string_view>

#include "deep_ep/standard.hpp"

namespace deep_ep {

/// The value of a variable, or its default. InvalidArgument, which names the allowed values, if it has another one.
/// @param name a variable of the table; std::logic_error for another name.
std::string environment_text(std::string_view name);

}  // namespace deep_ep
