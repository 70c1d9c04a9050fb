// docs/environment.md: every variable that the library reads, and what becomes of those that users of other libraries
// have set.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace deep_ep::tools {

/// A variable of another library, engine or launcher that users of such clusters set.
struct Other {
  std::string_view name;
  std::string_view value;   ///< what they set it to
  std::string_view reason;  ///< why the library need not read it, where the doctor has nothing to say
};
std::span<const Other> others();

struct Fate {
  enum class Kind { honoured, diagnosed, left_alone } kind = Kind::left_alone;
  std::string text;  ///< the row of the table that it stands for, or what the doctor says, or the reason
};
/// What becomes of it here: from the table of the library, then from the doctor.
Fate fate_of(const Other& other);

/// The page, in Markdown.
std::string reference_page();

}  // namespace deep_ep::tools
