// The options of a Buffer as all ranks agree on them.
#pragma once

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/buffer.hpp"

namespace deep_ep {

struct AgreedOptions {
  BufferOptions options;  ///< with what the environment says if the program leaves it open
  double timeout_s = 0;
};

/// Collective. Throws on every rank when the options are wrong on one, or differ where they must not.
AgreedOptions agree_on_options(Bootstrap& bootstrap, const BufferOptions& options);

}  // namespace deep_ep
