// The `deep_ep` command. Exit status: 0 well, 1 a check or the run failed, 2 the command line or a
// variable was wrong.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "tools/commands.hpp"
#include "tools/common/version.hpp"

namespace {

/// Errors are one line, whatever text they carry.
void print_error(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  fmt::print(stderr, "deep_ep: {}\n", deep_ep::trim(text));
}

[[noreturn]] void refuse(const std::string& text) { throw CLI::ParseError(text, CLI::ExitCodes::ExtrasError); }

/// Throws for a word that names no subcommand where one must stand: the parser would not say what is allowed.
void check_commands(const CLI::App& app, int argc, char** argv) {
  const CLI::App* command = &app;
  std::string path;
  for (int i = 1; i == argc || argv[i][0] != '-'; ++i) {
    const auto known = command->get_subcommands([](const CLI::App*) { return true; });
    if (known.empty()) break;
    std::vector<std::string> names;
    for (const CLI::App* one : known) names.push_back(one->get_name());
    const std::string allowed = fmt::format("allowed: {}", fmt::join(names, ", "));
    if (i == argc) refuse(fmt::format("the command behind `deep_ep{}` is missing, {}", path, allowed));
    path += fmt::format(" {}", argv[i]);
    const auto found = std::ranges::find(names, argv[i]);
    if (found == names.end()) refuse(fmt::format("'{}' is no command, {}", path.substr(1), allowed));
    command = known[static_cast<std::size_t>(found - names.begin())];
  }
}

/// Names the argument that the parser found too much, and the command's own.
std::string extras_text(const CLI::App& app) {
  const CLI::App* command = &app;
  std::string path = app.get_name();
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().front();
    path += " " + command->get_name();
  }
  const std::vector<std::string> extras = app.remaining(true);
  std::vector<std::string> names;
  for (const CLI::Option* option : command->get_options()) {
    if (!option->get_group().empty()) names.push_back(option->get_name());  // --markdown has none
  }
  return fmt::format("'{}' is no argument of `{}`, allowed: {}", extras.empty() ? "" : extras.front(), path,
                     fmt::join(names, ", "));
}

/// The status, or 1 where the output did not arrive.
int finish(int status) {
  std::cout.flush();
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good()) return status;
  print_error("cannot write the output");
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Expert-parallel dispatch and combine for Mixture-of-Experts models"};
  app.name("deep_ep");
  app.set_version_flag("--version", deep_ep::tools::version_text());
  app.require_subcommand(1);

  deep_ep::tools::Action action;
  deep_ep::tools::add_demo_command(app, action);
  deep_ep::tools::add_bench_command(app, action);
  deep_ep::tools::add_doctor_command(app, action);
  deep_ep::tools::add_env_command(app, action);
  deep_ep::tools::add_size_command(app, action);

  try {
    check_commands(app, argc, argv);
    app.parse(argc, argv);
  } catch (const CLI::ExtrasError&) {
    print_error(extras_text(app));
    return 2;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help, --version
      app.exit(error);
      return finish(0);
    }
    print_error(fmt::format("{} (see --help)", error.what()));
    return 2;
  }
  try {
    return finish(action());
  } catch (const deep_ep::RankMismatch& error) {
    print_error(error.what());
    return 1;
  } catch (const deep_ep::InvalidArgument& error) {
    print_error(error.what());
    return 2;
  } catch (const std::exception& error) {
    print_error(error.what());
    return 1;
  }
}
