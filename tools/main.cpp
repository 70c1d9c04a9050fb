// The `deep_ep` command. Exit status: 0 well, 1 a check or the run failed, 2 the command line or a
// variable was wrong.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "deep_ep/error.hpp"
#include "tools/commands.hpp"
#include "tools/common/version.hpp"

namespace {

/// Errors are one line, whatever text they carry.
void print_error(std::string text) {
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  while (!text.empty() && text.back() == ' ') text.pop_back();
  fmt::print(stderr, "deep_ep: {}\n", text);
}

bool is_command(const CLI::App& app, const std::string& word) {
  return !app.get_subcommands([&](const CLI::App* command) { return command->get_name() == word; }).empty();
}

/// What `launch` starts: the words behind --, which are nothing for the parser to take apart; it does not get them.
std::vector<std::string> take_words_to_launch(int& argc, char** argv) {
  std::vector<std::string> words;
  if (argc < 2 || std::string_view(argv[1]) != "launch") return words;
  char** const end = argv + argc;
  char** const dashes = std::find_if(argv, end, [](const char* word) { return std::string_view(word) == "--"; });
  if (dashes == end) return words;
  words.assign(dashes + 1, end);
  argc = static_cast<int>(dashes - argv);
  return words;
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
  const std::vector<std::string> words_to_launch = take_words_to_launch(argc, argv);
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
  deep_ep::tools::add_model_command(app, action);
  deep_ep::tools::add_launch_command(app, action, words_to_launch);

  try {
    if (argc > 1 && argv[1][0] != '-' && !is_command(app, argv[1])) {
      throw CLI::ParseError(fmt::format("'{}' is no command", argv[1]), CLI::ExitCodes::ExtrasError);
    }
    app.parse(argc, argv);
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
