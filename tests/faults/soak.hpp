// Mixed calls of both modes for a long time: what the process holds must stay flat.
#pragma once

namespace deep_ep::faults {

/// Prints a table. Returns the exit status: 0 if all results were right and nothing grew.
int soak(double minutes);

}  // namespace deep_ep::faults
