// docs/environment.md: every variable that the library reads, and what becomes of those that users of other libraries
// have set.
#pragma once

#include <string>

namespace deep_ep::tools {

/// The page, in Markdown.
std::string reference_page();

}  // namespace deep_ep::tools
