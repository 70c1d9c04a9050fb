// The environment variables of the library: one table, typed getters. Nothing else calls getenv for a DEEP_EP_ name.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace deep_ep::environment {

enum class Type : std::uint8_t { number, unsigned_integer, choice, text };

struct Variable {
  std::string_view name;
  Type type;
  std::string_view default_value;
  std::string_view allowed;  ///< for a choice: the words, separated by '|'; otherwise what a reader needs to know
  std::string_view help;
};

/// All variables, in the order in which `deep_ep env` prints them.
std::span<const Variable> variables();

/// The value in effect as text: what is set, otherwise the default. An empty value counts as not set.
std::string value(std::string_view name);
bool is_set(std::string_view name);

/// Typed getters. InvalidArgument names variable, value and what is allowed. Asking for a name that is not in the
/// table, or for another type than the table's, is a mistake in the library: std::logic_error.
double number(std::string_view name);                   ///< finite and not negative
std::uint64_t unsigned_integer(std::string_view name);  ///< decimal, or hexadecimal with 0x
std::string choice(std::string_view name);              ///< one of the words in `allowed`
std::string text(std::string_view name);

}  // namespace deep_ep::environment
