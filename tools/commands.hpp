// The subcommands of `deep_ep`. Each adds itself to the program and runs from its own file.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace deep_ep::tools {

/// Runs the chosen subcommand after the command line is parsed; returns the exit status.
using Action = std::function<int()>;

/// Each adds its subcommand to `app` and, if the user chose it, puts what to do into `action`.
void add_demo_command(CLI::App& app, Action& action);
void add_bench_command(CLI::App& app, Action& action);
void add_doctor_command(CLI::App& app, Action& action);
void add_env_command(CLI::App& app, Action& action);
void add_size_command(CLI::App& app, Action& action);

}  // namespace deep_ep::tools
