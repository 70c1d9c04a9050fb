#include "tools/env/reference.hpp"

#include <fmt/format.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "csrc/support/environment.hpp"
#include "tools/doctor/checks.hpp"
#include "tools/env/profiles.hpp"

namespace deep_ep::tools {
namespace {

const environment::Variable* row_with(std::string_view name) {
  for (const environment::Variable& variable : environment::variables()) {
    if (std::find(variable.names.begin(), variable.names.end(), name) != variable.names.end()) return &variable;
  }
  return nullptr;
}

/// A machine without files, where each variable is looked at alone.
class EmptyFolder {
 public:
  EmptyFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "deep_ep_empty_XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make a temporary folder");
    path_ = pattern;
  }
  ~EmptyFolder() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  EmptyFolder(const EmptyFolder&) = delete;
  EmptyFolder& operator=(const EmptyFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// What the doctor says where only this variable is set, on a machine without any files.
std::optional<Finding> diagnosis(const Other& other) {
  const EmptyFolder nothing;
  Patient patient;
  patient.root = topology::SystemRoot(nothing.path());
  patient.environment = [&](std::string_view name) -> std::optional<std::string> {
    return name == other.name ? std::optional<std::string>(other.value) : std::nullopt;
  };
  patient.variable_names = {std::string(other.name)};
  Findings findings;
  check_variables(patient, findings);
  for (const Finding& finding : findings) {
    if (finding.found.find(other.name) != std::string::npos) return finding;
  }
  return std::nullopt;
}

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

What users bring along from their scripts for DeepEP, NVSHMEM, NCCL and engines.

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

Fate fate_of(const Other& other) {
  if (const environment::Variable* row = row_with(other.name)) {
    return {Fate::Kind::honoured,
            row->name() == other.name ? fmt::format("read: {}", row->help) : fmt::format("read as {}", row->name())};
  }
  if (const std::optional<Finding> finding = diagnosis(other)) {
    return {Fate::Kind::diagnosed,
            finding->action.empty() ? finding->meaning : fmt::format("{} ({})", finding->meaning, finding->action)};
  }
  return {Fate::Kind::left_alone, std::string(other.reason)};
}

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
  for (const Other& other : others()) {
    text += fmt::format("| `{}` | {} |\n", other.name, cell(fate_of(other).text));
  }
  return text;
}

}  // namespace deep_ep::tools
