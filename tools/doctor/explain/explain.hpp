// `deep_ep doctor --explain TEXT`: what an error message of any program means, and what to do about it.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace deep_ep::tools {

/// A message of this library or of another program: a row of the tables of docs/reference/errors.md and
/// docs/reference/foreign-errors.md. `...` in a pattern stands for whatever varies.
struct KnownError {
  std::string origin;  ///< who says it: "deep_ep", "NCCL", "libibverbs", ...
  std::vector<std::string> patterns;
  std::string cause;
  std::string remedy;
};
const std::vector<KnownError>& known_errors();
/// Reads such a page; rows of other tables than those of messages are left out, and patterns that say too little. With
/// an empty `origin` that is the heading above a table.
std::vector<KnownError> read_error_page(std::span<const std::string_view> lines, const std::string& origin);

/// How much a pattern says: its letters and digits.
std::size_t weight_of(std::string_view pattern);
/// The library's own patterns that say less than this are pieces of longer messages, and would explain anything.
inline constexpr std::size_t kLeastWeight = 10;

/// A text, however it is spaced, whatever its case and kind of quotes.
std::string normal(std::string_view text);
/// Whether the pieces between the `...` of a pattern follow one another in such a text.
bool is_like(const std::string& normal_text, std::string_view pattern);

struct Explanation {
  std::string origin;   ///< "deep_ep" for the library's own
  std::string pattern;  ///< what was recognised
  std::string cause;
  std::string remedy;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Explanation, origin, pattern, cause, remedy)

/// All that is known of the text, what says most first.
std::vector<Explanation> explain(std::string_view text);

/// The first three, and a line that counts the others.
std::string to_text(const std::vector<Explanation>& explanations);
nlohmann::json to_json(std::string_view text, const std::vector<Explanation>& explanations);

/// The command; `text` "-" means standard input. Exit status: 1 where nothing is known.
int run_explain(const std::string& text, bool json);

}  // namespace deep_ep::tools
