// The options of a Buffer as all ranks agree on them.
#pragma once

#include <cstddef>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/buffer.hpp"

namespace deep_ep {

/// The largest size that an option may have: sums of a few do not wrap.
constexpr std::size_t kMostOptionBytes = std::size_t{1} << 56;

struct AgreedOptions {
  BufferOptions options;  ///< with what the environment says if the program leaves it open
  double timeout_s = 0;   ///< with masking the longest of all ranks'; 0: for ever
};

/// Collective. Throws on every rank when the options are wrong on one, or differ where they must not.
AgreedOptions agree_on_options(Bootstrap& bootstrap, const BufferOptions& options);

}  // namespace deep_ep
