// The environment variables that the library heeds: one table, and the one place that decides which of several counts.
// Nothing else calls getenv for a name of the table.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "deep_ep/error.hpp"

namespace deep_ep::environment {

/// One thing that variables decide. The first of `names` that is set counts; a name of another library counts only if
/// its value is understood, in the notation of that library. An empty value counts as not set.
struct Variable {
  std::array<std::string_view, 4> names{};  ///< the library's own first, where it has one; unused places are empty
  std::string_view default_value = {};
  std::string_view choices = {};       ///< words, separated by '|': besides numbers, and instead of other texts
  std::string_view allowed = choices;  ///< what a reader needs to know
  std::string_view help;
  std::uint64_t most = 0;  ///< of a whole number; 0: it is a text, for Reader::read()
  bool is_number = false;  ///< of any kind

  std::string_view name() const { return names[0]; }
  std::span<const std::string_view> others() const;  ///< all but name()
};

/// All variables, in the order in which `deep_ep env` prints them.
std::span<const Variable> variables();

/// Is this one of the library's own variables? A wrong value of those is an error, one of another library's a warning,
/// because that library may accept it.
inline bool is_own(std::string_view name) { return name.starts_with("DEEP_EP_"); }

/// The value of a variable that is set and not empty.
using Source = std::function<std::optional<std::string>(std::string_view name)>;
std::optional<std::string> of_process(std::string_view name);

struct Value {
  std::string text;       ///< in the words of the table
  std::string_view name;  ///< the variable that it comes from; empty: the default

  /// Finite, zero or more; or whole, also hexadecimal with 0x. Nothing where the text is another one.
  std::optional<double> number() const;
  std::optional<std::uint64_t> integer() const;
};

/// Asks the table. Names of the functions' arguments are Variable::name(). Asking for a name that is not in the table
/// is a mistake in the library: std::logic_error.
struct Reader {
  Source source = of_process;
  std::vector<std::string> taken = {};    ///< "NCCL_IB_TC=52": variables of other libraries that are in effect
  std::vector<std::string> ignored = {};  ///< "NCCL_IB_TC='x' is ignored: ...": those that are not understood

  /// Of a text, only that it is set is looked at. InvalidArgument where the library's own variable has a wrong value:
  /// its name, the value, what is allowed.
  Value value(std::string_view name);
  /// Of the first name that is set to what `judge` does not refuse by InvalidArgument; else the default.
  Value value(std::string_view name, const std::function<void(const Value&)>& judge);
  /// A text, read by `parse(value)`, whose InvalidArgument says why a value is wrong: of the first name that is set to
  /// what it understands. What is made of nothing, where nothing is set.
  template <class Parse>
  auto read(std::string_view name, const Parse& parse) {
    decltype(parse(Value{})) result{};
    value(name, [&](const Value& set) { result = parse(set); });
    return result;
  }
};

/// The variables of this process.
inline double number(std::string_view name) { return Reader{}.value(name).number().value(); }
inline std::uint64_t unsigned_integer(std::string_view name) { return Reader{}.value(name).integer().value(); }
inline std::string text(std::string_view name) { return Reader{}.value(name).text; }

}  // namespace deep_ep::environment
