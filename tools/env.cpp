// `deep_ep env`: the environment variables of the library, their values and meanings.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "csrc/support/environment.hpp"
#include "deep_ep/error.hpp"
#include "tools/commands.hpp"
#include "tools/common/json_output.hpp"

namespace deep_ep::tools {
namespace {

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

int print_as_json() {
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
  print_json(table);
  return 0;
}

int print_table() {
  for (const environment::Variable& variable : environment::variables()) {
    const auto [value, problem] = in_effect(variable);
    fmt::print("{} = {}{}\n", variable.name(), value.text.empty() ? "(empty)" : value.text,
               value.name.empty()              ? "  (default)"
               : value.name == variable.name() ? "  (set)"
                                               : fmt::format("  (by {})", value.name));
    fmt::print("    {}\n", variable.help);
    if (!variable.allowed.empty()) fmt::print("    allowed: {}\n", variable.allowed);
    if (!variable.others().empty()) fmt::print("    where it is not set: {}\n", fmt::join(variable.others(), ", "));
    if (!problem.empty()) fmt::print("    {}\n", problem);
  }
  return 0;
}

}  // namespace

void add_env_command(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("env", "Print the environment variables the library reads");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print JSON");
  command->callback([json, &action] { action = [json] { return *json ? print_as_json() : print_table(); }; });
}

}  // namespace deep_ep::tools
