// The subcommands of `deep_ep bench` that have files of their own.
#pragma once

#include "tools/commands.hpp"

namespace deep_ep::tools {

void add_bench_low_latency(CLI::App& bench, Action& action);
void add_bench_selftest(CLI::App& bench, Action& action);
void add_bench_wire(CLI::App& bench, Action& action);

}  // namespace deep_ep::tools
