// The `deep_ep` command. Exit status: 0 well, 1 a check or the run failed, 2 the command line was wrong.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <string>

#include "deep_ep/version.hpp"
#include "tools/commands.hpp"

namespace {

/// Errors are one line, whatever text they carry.
void print_error(std::string text) {
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  while (!text.empty() && text.back() == ' ') text.pop_back();
  fmt::print(stderr, "deep_ep: {}\n", text);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Expert-parallel dispatch and combine for Mixture-of-Experts models"};
  app.name("deep_ep");
  app.set_version_flag("--version", DEEP_EP_VERSION);
  app.require_subcommand(1);

  deep_ep::tools::Action action;
  deep_ep::tools::add_demo_command(app, action);
  deep_ep::tools::add_bench_command(app, action);
  deep_ep::tools::add_doctor_command(app, action);
  deep_ep::tools::add_env_command(app, action);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    print_error(fmt::format("{} (see --help)", error.what()));
    return 2;
  }
  try {
    const int status = action();
    if (std::fflush(stdout) != 0) throw std::runtime_error("cannot write the output");
    return status;
  } catch (const std::exception& error) {
    print_error(error.what());
    return 1;
  }
}
