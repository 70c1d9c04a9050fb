// JSON as all subcommands print it.
#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace deep_ep::tools {

/// Bytes that are no UTF-8 (file names and variables may have them) become U+FFFD: the rest is worth printing.
inline void print_json(const nlohmann::json& value) {
  fmt::print("{}\n", value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace deep_ep::tools
