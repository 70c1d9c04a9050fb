#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "csrc/support/environment.hpp"
#include "csrc/support/text.hpp"
#include "tools/env/env.hpp"

namespace deep_ep::tools {
namespace {

/// A text from elsewhere must not end its comment.
std::string one_line(std::string text) {
  std::ranges::replace_if(
      text, [](unsigned char c) { return c < ' '; }, ' ');
  return text;
}

/// A string of JSON is one of YAML, too.
std::string quoted_for_yaml(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string heading(const Environment& environment, const Profile* profile) {
  std::string text = "# The environment of deep_ep, made by `deep_ep env`";
  if (profile != nullptr) text += fmt::format(" --profile {}", profile->name);
  text += ". The library also works with no variable set.\n";
  for (const std::string& note : environment.notes) text += fmt::format("# Note: {}\n", one_line(note));
  return text;
}

bool is_own(const Environment& environment, const std::string& name) {
  return std::ranges::any_of(environment.own, [&](const Assignment& assignment) {
    return assignment.name == name && assignment.origin != Origin::standard;
  });
}

std::string script_note(const Environment& environment) {
  return environment.nccl_script.empty()
             ? ""
             : fmt::format("{} is there and wins over these values of NCCL: source it where the program starts.",
                           environment.nccl_script);
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
variable is ignored with a warning. `deep_ep env` prints the values of this process, `deep_ep env --explain` also says
where they come from, and `deep_ep doctor` warns of names that no program reads.

The command writes this page: `build/host/bin/deep_ep env --markdown > docs/reference/environment.md`. A test compares.

## Read by the library

| Variable | Others that stand for it | Default | Allowed | What it decides |
| --- | --- | --- | --- | --- |
)";

constexpr std::string_view kScripts =
    R"(
## Scripts that set variables

```sh
deep_ep env --format shell > deep_ep_env.sh      # what is set or found here, to source; any number of times
deep_ep env --profile gke-a4 --nccl --format yaml   # for the `env` of a container; NCCL's variables as well
deep_ep env --profile gke-a4 --format helm       # values for deploy/helm/deep-ep-testbed: helm install -f
deep_ep env --profile gke-a4 --explain           # every value, and where it comes from
```

A variable that is set wins over the profile, the profile over the values that were found, and these over the default.
Nothing is preloaded. gIB's folder comes last in `LD_LIBRARY_PATH`, because NCCL does not find it otherwise; no other
search path changes. If the machine has gIB's own script, `/usr/local/gib/scripts/set_nccl_env.sh`, the script decides
about NCCL's variables, and the shell form calls it.

| Profile | For | Sets | With `--nccl` also |
| --- | --- | --- | --- |
)";

constexpr std::string_view kOtherLibraries =
    R"(
## Variables of other libraries, engines and launchers

Scripts for DeepEP, NVSHMEM, NCCL and engines set these variables, and the library does not read them. The first table
has those that it reads in place of its own.

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

std::string to_shell(const Environment& environment, const Profile* profile) {
  std::string text = heading(environment, profile);
  bool gib = false;
  for (const Assignment& assignment : to_set(environment)) {
    // NCCL's variables are left to the plug-in's script, but for those that the user has set himself, and the loader's.
    if (!environment.nccl_script.empty() && !is_own(environment, assignment.name) &&
        assignment.origin != Origin::other && assignment.name != "LD_LIBRARY_PATH") {
      continue;
    }
    gib |= assignment.name == "NCCL_NET" && assignment.value == "gIB";
    text += fmt::format("# {}\nexport {}={}\n", one_line(assignment.source), assignment.name,
                        quoted_for_shell(assignment.value));
  }
  if (!environment.nccl_script.empty()) {
    const std::string script = quoted_for_shell(environment.nccl_script);
    text += fmt::format(
        "# NCCL: the plug-in's own script is on this machine, and wins over the profile.\n"
        "if [ -r {0} ]; then . {0}; fi\n",
        script);
    gib = true;
  }
  if (gib) {
    text +=
        "# gIB refuses to start beside it: \"NCCL/NET (shim) mismatch recommended\".\n"
        "unset TORCH_NCCL_USE_COMM_NONBLOCKING\n";
  }
  return text;
}

std::string to_yaml(const Environment& environment, const Profile* profile, bool helm) {
  std::string text = heading(environment, profile);
  if (const std::string note = script_note(environment); !note.empty()) text += fmt::format("# {}\n", note);
  const std::vector<Assignment> assignments = to_set(environment);
  if (assignments.empty()) return text + (helm ? "workload:\n  env: {}\n" : "[]\n");
  if (helm) text += "workload:\n  env:\n";
  for (const Assignment& assignment : assignments) {
    const std::string value = quoted_for_yaml(assignment.value);
    text += helm ? fmt::format("    # {}\n    {}: {}\n", one_line(assignment.source), assignment.name, value)
                 : fmt::format("# {}\n- name: {}\n  value: {}\n", one_line(assignment.source), assignment.name, value);
  }
  return text;
}

std::string explain(const Environment& environment) {
  std::string text;
  for (const auto* part : {&environment.own, &environment.nccl}) {
    for (const Assignment& assignment : *part) {
      text += fmt::format("{} = {}\n    {}\n", assignment.name, assignment.value.empty() ? "(empty)" : assignment.value,
                          assignment.source);
    }
  }
  if (const std::string note = script_note(environment); !note.empty()) text += note + "\n";
  for (const std::string& note : environment.notes) text += fmt::format("note: {}\n", note);
  return text;
}

std::string reference_page() {
  std::string text(kIntroduction);
  for (const environment::Variable& variable : environment::variables()) {
    text += fmt::format("| `{}` | {} | {} | {} | {} |\n", variable.name(), codes(variable.others()),
                        code(variable.default_value), cell(variable.allowed), cell(variable.help));
  }
  text += kScripts;
  for (const Profile& profile : profiles()) {
    text += fmt::format(
        "| `{}` | {} | {} | {}{} |\n", profile.name, cell(profile.help), settings(profile.own), settings(profile.nccl),
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
