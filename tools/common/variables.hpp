// Environment variables, looked at before a command works for long.
#pragma once

namespace deep_ep::tools {

/// Throws InvalidArgument where a variable of the library's own has a wrong value, also one that this run does not
/// read. Warns of names that no program reads.
void check_environment();

}  // namespace deep_ep::tools
