// How much memory this process can still take from the host.
#pragma once

#include <cstddef>
#include <string>

namespace deep_ep {

/// Bytes that the system, and the control group (v2) of this process, can give without ending a process for them. The
/// largest number where the system does not tell. `root`: of the file system.
std::size_t available_host_memory(const std::string& root = "");

}  // namespace deep_ep
