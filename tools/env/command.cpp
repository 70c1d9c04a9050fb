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
  const bool looks = options.explain || !options.format.empty() || !options.sysroot.empty();
  if (options.json + options.markdown + options.explain + !options.format.empty() > 1 || (options.json && looks)) {
    throw InvalidArgument("--json, --format and --explain exclude each other");
  }
  if (options.json) print_json(variables_json());
  if (options.markdown) fmt::print("{}", reference_page());
  if (options.json || options.markdown) return 0;
  if (!looks) {
    print_table();
    return 0;
  }
  const Environment environment =
      environment_of(examine(options.sysroot.empty() ? topology::SystemRoot() : topology::SystemRoot(options.sysroot),
                             environment::of_process, tools::names_of_process()));
  fmt::print("{}", options.explain ? explain(environment) : to_shell(environment));
  return 0;
}

}  // namespace

void add_env_command(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("env", "Print the environment variables the library reads");
  auto options = std::make_shared<EnvOptions>();
  command->add_flag("--json", options->json, "Print JSON");
  command
      ->add_option("--format", options->format, "Print what is set or was found on this machine: shell, to source it")
      ->check(CLI::IsMember({"shell"}));
  command->add_flag("--explain", options->explain, "Print every value and where it comes from");
  command->add_option("--sysroot", options->sysroot, "Look at the files below this folder instead of this machine's");
  // docs/reference/environment.md is its output; a test compares.
  command->add_flag("--markdown", options->markdown)->group("");
  command->callback([options, &action] { action = [options] { return run_env(*options); }; });
}

}  // namespace deep_ep::tools
