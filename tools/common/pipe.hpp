// A pipe whose ends no program inherits.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>

#include "csrc/support/format.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::tools {

struct Pipe {
  /// `what`: cannot be done without one: "launch: cannot start ranks". SystemError.
  explicit Pipe(std::string_view what) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) fail<SystemError>("{}: no pipe: {}", what, errno_text(errno));
    out = UniqueFd(ends[0]);
    in = UniqueFd(ends[1]);
  }
  UniqueFd out;  ///< to read
  UniqueFd in;
};

}  // namespace deep_ep::tools
