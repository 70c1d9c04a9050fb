// The ranks of one of two emulated machines.
#pragma once

#include <string>

namespace deep_ep::test {

/// Two ranks on each machine: those of a machine share memory, those of different ones reach each other over RoCE.
/// Throws what a rank met.
void run_machine_ranks(int machine, const std::string& other_machine);

}  // namespace deep_ep::test
