// `deep_ep env`: the environment variables of the library, their values and meanings, and scripts that set them.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "csrc/support/environment.hpp"
#include "deep_ep/error.hpp"
#include "tools/commands.hpp"
#include "tools/common/json_output.hpp"
#include "tools/common/variables.hpp"
#include "tools/env/env.hpp"

namespace deep_ep::tools {
namespace {

struct EnvOptions {
  bool json = false;
  bool explain = false;
  bool markdown = false;
  std::string format;
  std::string sysroot = "/";
};

nlohmann::json to_json(const std::vector<Assignment>& rows) {
  nlohmann::json table = nlohmann::json::array();
  for (const Assignment& row : rows) {
    table.push_back({{"name", row.variable->name()},
                     {"value", row.value.text},
                     {"set", !row.value.name.empty()},
                     {"from", row.value.name},
                     {"problem", row.problem},
                     {"default", row.variable->default_value},
                     {"allowed", row.variable->allowed},
                     {"others", row.variable->others()},
                     {"help", row.variable->help}});
  }
  return table;
}

/// `briefly`: values and where they come from.
void print_table(const std::vector<Assignment>& rows, bool briefly) {
  for (const Assignment& row : rows) {
    fmt::print("{} = {}\n", row.name, row.text.empty() ? "(empty)" : row.text);
    if (!row.source.empty()) fmt::print("    {}\n", row.source);
    if (!row.problem.empty()) fmt::print("    {}\n", row.problem);
    if (briefly) continue;
    fmt::print("    {}\n", row.variable->help);
    if (!row.variable->allowed.empty()) fmt::print("    allowed: {}\n", row.variable->allowed);
    const auto others = row.variable->others();
    if (!others.empty()) fmt::print("    where it is not set: {}\n", fmt::join(others, ", "));
  }
}

int run_env(const EnvOptions& options) {
  if (options.markdown) {
    fmt::print("{}", reference_page());
    return 0;
  }
  const Patient patient =
      examine(topology::SystemRoot(options.sysroot), environment::of_process, tools::names_of_process());
  if (!options.format.empty()) {
    fmt::print("{}", to_shell(patient));
  } else if (options.json) {
    print_json(to_json(assignments_of(patient)));
  } else {
    print_table(assignments_of(patient), options.explain);
    for (const std::string& note : gpus_without_nic(patient)) fmt::print("note: {}\n", note);
  }
  return 0;
}

}  // namespace

void add_env_command(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("env", "Print the environment variables the library reads");
  auto options = std::make_shared<EnvOptions>();
  CLI::Option* json = command->add_flag("--json", options->json, "Print JSON");
  CLI::Option* format = command
                            ->add_option("--format", options->format,
                                         "Print what is set or was found on this machine: shell, to source it")
                            ->check(CLI::IsMember({"shell"}))
                            ->excludes(json);
  command->add_flag("--explain", options->explain, "Print values and where they come from, and no more")
      ->excludes(json)
      ->excludes(format);
  command->add_option("--sysroot", options->sysroot, "Look at the files below this folder instead of this machine's");
  // docs/reference/environment.md is its output; a test compares.
  command->add_flag("--markdown", options->markdown)->group("");
  command->callback([options, &action] { action = [options] { return run_env(*options); }; });
}

}  // namespace deep_ep::tools
