#include "tools/env/print.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

namespace deep_ep::tools {
namespace {

/// A text from elsewhere must not end its comment.
std::string one_line(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < ' '; }, ' ');
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
  return std::any_of(environment.own.begin(), environment.own.end(), [&](const Assignment& assignment) {
    return assignment.name == name && assignment.origin != Origin::standard;
  });
}

std::string script_note(const Environment& environment) {
  return environment.nccl_script.empty()
             ? ""
             : fmt::format("{} is there and wins over these values of NCCL: source it where the program starts.",
                           environment.nccl_script);
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

}  // namespace deep_ep::tools
