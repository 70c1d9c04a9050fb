#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "csrc/support/environment.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "tools/env/env.hpp"

namespace deep_ep::tools {
namespace {

/// A text from elsewhere must not end its comment.
std::string one_line(std::string text) {
  std::ranges::replace_if(
      text, [](unsigned char c) { return c < ' '; }, ' ');
  return text;
}

// --- docs/reference/environment.md ---

/// Bars and angle brackets have a meaning in tables.
std::string cell(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '|' || c == '<' || c == '>' || c == '*' || c == '_') result += '\\';
    result += c;
  }
  return result;
}

std::string code(std::string_view text) {
  std::string result;
  for (const char c : text) result += c == '|' ? std::string("\\|") : std::string(1, c);
  return text.empty() ? "" : fmt::format("`{}`", result);
}

std::string codes(std::span<const std::string_view> names) {
  std::string text;
  for (const std::string_view name : names) text += fmt::format("{}`{}`", text.empty() ? "" : ", ", name);
  return text;
}

constexpr std::string_view kIntroduction =
    R"(# Environment variables

No variable is needed. If several variables with one meaning are set, the library's own wins, then the others in the
order given. A wrong value of the library's own variable is an error that names it. A wrong value of another library's
variable is ignored with a warning. `deep_ep env` prints the values of this process, where they come from and what they mean,
`--explain` leaves the meanings out, and `deep_ep doctor` warns of names that no program reads.

The command writes this page: `build/host/bin/deep_ep env --markdown > docs/reference/environment.md`. A test compares.

## Read by the library

| Variable | Others that stand for it | Default | Allowed | What it decides |
| --- | --- | --- | --- | --- |
)";

constexpr std::string_view kScripts =
    R"(
## A script that sets variables

```sh
deep_ep env --format shell > deep_ep_env.sh      # what is set or found here, to source; any number of times
deep_ep env --explain                            # every value, and where it comes from
```

A variable that is set wins over the values that were found, and these over the default. Nothing is preloaded, and no
search path changes. NCCL's own variables are not among them: on GKE, gIB's `/usr/local/gib/scripts/set_nccl_env.sh`
sets those.
)";

constexpr std::string_view kOtherLibraries =
    R"(
## Variables of other libraries, engines and launchers

Scripts for DeepEP, NVSHMEM, NCCL and engines set these variables, and the library does not read them. The first table
has those that it reads in place of its own.

| Variable | Here |
| --- | --- |
)";

}  // namespace

std::vector<std::string> gpus_without_nic(const Patient& patient) {
  std::vector<std::string> notes;
  for (const rdma::NicMapRow& row : patient.map.rows) {
    if (row.nics.empty() && row.gpu.cuda_id) notes.push_back(row.text());
  }
  return notes;
}

std::string quoted_for_shell(const std::string& text) {
  std::string result = "'";
  for (const char c : text) {
    if (c == '\'') {
      result += R"('\'')";
    } else {
      result += c;
    }
  }
  return result + "'";
}

std::string to_shell(const Patient& patient) {
  std::string notes =
      "# The environment of deep_ep, made by `deep_ep env`. The library also works with no variable set.\n";
  std::string text;
  std::set<std::string> known;  // a variable of another library may stand for several
  for (const Assignment& row : assignments_of(patient)) {
    if (row.refused()) throw InvalidArgument(row.problem);
    if (!row.problem.empty()) notes += fmt::format("# Note: {}\n", one_line(row.problem));
    if (row.source == "default" || !known.insert(row.name).second) continue;
    text += fmt::format("# {}\nexport {}={}\n", one_line(row.source), row.name, quoted_for_shell(row.text));
  }
  for (const std::string& note : gpus_without_nic(patient)) notes += fmt::format("# Note: {}\n", one_line(note));
  return notes + text;
}

std::string reference_page() {
  std::string text(kIntroduction);
  for (const environment::Variable& variable : environment::variables()) {
    text += fmt::format("| `{}` | {} | {} | {} | {} |\n", variable.name(), codes(variable.others()),
                        code(variable.default_value), cell(variable.allowed), cell(variable.help));
  }
  text += kScripts;
  text += kOtherLibraries;
  for (const ForeignVariable& row : foreign_variables()) {
    const std::string_view action = row.action;
    text += fmt::format("| {} | {} |\n", codes(split(row.names, ' ')),
                        cell(action.empty() ? row.meaning : fmt::format("{} ({})", row.meaning, action)));
  }
  return text;
}

}  // namespace deep_ep::tools
