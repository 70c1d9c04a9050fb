// `deep_ep env`: the environment variables of the library, their values and meanings, and scripts that set them.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "csrc/support/environment.hpp"
#include "deep_ep/error.hpp"
#include "tools/commands.hpp"
#include "tools/common/command_line.hpp"
#include "tools/common/json_output.hpp"
#include "tools/common/variables.hpp"
#include "tools/env/env.hpp"

namespace deep_ep::tools {
namespace {

struct EnvOptions {
  bool json = false;
  bool explain = false;
  bool markdown = false;
  bool nccl = false;
  std::string format;
  std::string profile;
  std::string sysroot;
};

struct InEffect {
  environment::Value value;
  std::string problem;  ///< why the library refuses it, or which variables of others it does not understand
};

InEffect in_effect(const environment::Variable& variable) {
  environment::Reader reader;
  try {
    InEffect result{reader.value(variable.name()), {}};
    result.problem = fmt::format("{}", fmt::join(reader.ignored(), "; "));
    return result;
  } catch (const InvalidArgument& error) {
    return {{environment::of_process(variable.name()).value_or(""), variable.name()}, error.what()};
  }
}

nlohmann::json variables_json() {
  nlohmann::json table = nlohmann::json::array();
  for (const environment::Variable& variable : environment::variables()) {
    const auto [value, problem] = in_effect(variable);
    table.push_back({{"name", variable.name()},
                     {"value", value.text},
                     {"set", !value.name.empty()},
                     {"from", value.name},
                     {"problem", problem},
                     {"default", variable.default_value},
                     {"allowed", variable.allowed},
                     {"others", variable.others()},
                     {"help", variable.help}});
  }
  return table;
}

void print_table() {
  for (const environment::Variable& variable : environment::variables()) {
    const auto [value, problem] = in_effect(variable);
    fmt::print("{} = {}{}\n    {}\n", variable.name(), value.text.empty() ? "(empty)" : value.text,
               value.name.empty()              ? "  (default)"
               : value.name == variable.name() ? "  (set)"
                                               : fmt::format("  (by {})", value.name),
               variable.help);
    if (!variable.allowed.empty()) fmt::print("    allowed: {}\n", variable.allowed);
    if (!variable.others().empty()) fmt::print("    where it is not set: {}\n", fmt::join(variable.others(), ", "));
    if (!problem.empty()) fmt::print("    {}\n", problem);
  }
}

int run_env(const EnvOptions& options) {
  const bool script = !options.format.empty() || !options.profile.empty() || options.nccl || !options.sysroot.empty();
  if (options.json + options.markdown + (script || options.explain) > 1) {
    throw InvalidArgument("--json and a script (--format, --profile, --nccl, --explain) exclude each other");
  }
  if (options.explain && !options.format.empty()) {
    throw InvalidArgument(
        "--explain is a text of its own, and goes without --format; every form has its sources as comments");
  }
  if (options.nccl && options.profile.empty()) {
    throw InvalidArgument("--nccl: the variables of NCCL belong to a --profile, and none was given");
  }
  if (options.json) print_json(variables_json());
  if (options.markdown) fmt::print("{}", reference_page());
  if (options.json || options.markdown) return 0;
  if (!script && !options.explain) {
    print_table();
    return 0;
  }
  const Profile* profile = options.profile.empty() ? nullptr : &profile_of(options.profile);
  const Patient patient =
      examine(options.sysroot.empty() ? topology::SystemRoot() : topology::SystemRoot(options.sysroot),
              environment::of_process, tools::names_of_process());
  const Environment environment = environment_of(patient, profile, options.nccl);
  fmt::print("{}", options.explain ? explain(environment)
                   : options.format == "yaml" || options.format == "helm"
                       ? to_yaml(environment, profile, options.format == "helm")
                       : to_shell(environment, profile));
  return 0;
}

}  // namespace

void add_env_command(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("env", "Print the environment variables the library reads");
  auto options = std::make_shared<EnvOptions>();
  command->add_flag("--json", options->json, "Print JSON");
  command
      ->add_option("--format", options->format,
                   "Print what is set, comes from the profile or was found on this machine: shell to source, yaml for "
                   "the env of a container, helm for the values of a chart")
      ->check(CLI::IsMember({"shell", "yaml", "helm"}));
  std::string names;
  for (const Profile& profile : profiles()) names += fmt::format("\n  {}: {}", profile.name, profile.help);
  command->add_option("--profile", options->profile, "Add what suits a kind of cluster:" + names);
  command->add_flag("--nccl", options->nccl, "With --profile: NCCL's own variables as well");
  command->add_flag("--explain", options->explain, "Print every value and where it comes from");
  command->add_option("--sysroot", options->sysroot, "Look at the files below this folder instead of this machine's");
  add_gone_options(*command, {{"--list", "without it the names stand in front"}});
  // docs/reference/environment.md is its output; a test compares.
  command->add_flag("--markdown", options->markdown)->group("");
  command->callback([options, &action] { action = [options] { return run_env(*options); }; });
}

}  // namespace deep_ep::tools
