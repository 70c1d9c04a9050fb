#include "tools/env/reference.hpp"

#include <fmt/format.h>

#include <span>
#include <vector>

#include "csrc/support/environment.hpp"
#include "csrc/support/text.hpp"
#include "tools/doctor/checks.hpp"
#include "tools/env/profiles.hpp"

namespace deep_ep::tools {
namespace {

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

Made by the tool from the tables that the library and the doctor read; a test compares. After a change of those:
`build/host/bin/deep_ep env --markdown > docs/environment.md`.

No variable is needed. Where several are set that mean the same, the library's own wins, then the others in the order
given. A wrong value of an own variable is an error that names it; a value of another library's that is not understood
is ignored with a warning. `deep_ep env` prints what is in effect in this process, `deep_ep env --explain` also why, and
`deep_ep doctor` warns of names that nobody reads.

## Read by the library

| Variable | Others that stand for it | Default | Allowed | What it decides |
| --- | --- | --- | --- | --- |
)";

constexpr std::string_view kScripts =
    R"(
## Scripts that set them

```sh
deep_ep env --format shell > deep_ep_env.sh      # what is set or found here, to source; any number of times
deep_ep env --profile gke-a4 --nccl --format yaml   # for the `env` of a container; NCCL's variables as well
deep_ep env --profile infiniband --format helm   # values for deploy/helm/deep-ep-testbed: helm install -f
deep_ep env --profile gke-a4 --explain           # every value, and where it comes from
```

A variable that is set wins over the profile, the profile over what was found, and that over the default. Nothing is
preloaded. No search path is changed, but for that of gIB, which NCCL does not find otherwise: its folder comes last in
`LD_LIBRARY_PATH`. Where gIB's own script, `/usr/local/gib/scripts/set_nccl_env.sh`, is on the
machine, it decides about NCCL, and the shell form calls it.

| Profile | For | Sets | With `--nccl` also |
| --- | --- | --- | --- |
)";

constexpr std::string_view kOtherLibraries =
    R"(
## Variables of other libraries, engines and launchers

What users bring along from their scripts for DeepEP, NVSHMEM, NCCL and engines, and the library does not read. What it
reads in the place of a variable of its own is in the first table.

| Variable | Here |
| --- | --- |
)";

std::string settings(const std::vector<Setting>& all) {
  std::string text;
  for (const Setting& setting : all)
    text += fmt::format("{}`{}={}`", text.empty() ? "" : ", ", setting.name, setting.value);
  return text;
}

}  // namespace

std::string reference_page() {
  std::string text(kIntroduction);
  for (const environment::Variable& variable : environment::variables()) {
    text += fmt::format("| `{}` | {} | {} | {} | {} |\n", variable.name(), codes(variable.others()),
                        code(variable.default_value), cell(variable.allowed), cell(variable.help));
  }
  text += kScripts;
  for (const Profile& profile : profiles()) {
    text +=
        fmt::format("| `{}` | {} | {} | {}{}{} |\n", profile.name, cell(profile.help), settings(profile.own),
                    settings(profile.nccl), profile.nccl_nics ? ", `NCCL_IB_HCA` with the NICs that were found" : "",
                    profile.nccl_folder.empty() ? "" : fmt::format(", `{}` in `LD_LIBRARY_PATH`", profile.nccl_folder));
  }
  text += kOtherLibraries;
  for (const ForeignVariable& row : foreign_variables()) {
    const std::string_view action = row.action;
    text += fmt::format("| {} | {} |\n", codes(split(row.names, ' ')),
                        cell(action.empty() ? row.meaning : fmt::format("{} ({})", row.meaning, action)));
  }
  return text;
}

}  // namespace deep_ep::tools
