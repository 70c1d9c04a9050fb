// `deep_ep env`: the environment variables of the library, their values and meanings.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "csrc/support/environment.hpp"
#include "tools/commands.hpp"

namespace deep_ep::tools {
namespace {

int print_json() {
  nlohmann::json table = nlohmann::json::array();
  for (const environment::Variable& variable : environment::variables()) {
    table.push_back({{"name", variable.name},
                     {"value", environment::value(variable.name)},
                     {"set", environment::is_set(variable.name)},
                     {"default", variable.default_value},
                     {"allowed", variable.allowed},
                     {"help", variable.help}});
  }
  fmt::print("{}\n", table.dump(2));
  return 0;
}

int print_table() {
  for (const environment::Variable& variable : environment::variables()) {
    const std::string value = environment::value(variable.name);
    fmt::print("{} = {}{}\n", variable.name, value.empty() ? "(empty)" : value,
               environment::is_set(variable.name) ? "  (set)" : "  (default)");
    fmt::print("    {}\n", variable.help);
    if (!variable.allowed.empty()) fmt::print("    allowed: {}\n", variable.allowed);
  }
  return 0;
}

}  // namespace

void add_env_command(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("env", "Print the environment variables the library reads");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print JSON");
  command->callback([json, &action] { action = [json] { return *json ? print_json() : print_table(); }; });
}

}  // namespace deep_ep::tools
