// A kernel that copies rows of a low-latency dispatch as soon as the arrival counters say that they are there.
#pragma once

#include "kernels/low_latency/params.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::consumers {

struct ArrivalsParams {
  const std::int64_t* words;  ///< [blocks, words of a block]
  int blocks, words_of_block, rows_of_word;
  std::int64_t calls;  ///< that were given these words, this one included
  std::uint64_t timeout_ns;

  int rows, row_bytes, scale_columns;  ///< of a block; of a row; 0 columns: none
  const std::byte *recv_x, *recv_scales;
  const std::int32_t *recv_count, *src_info;
  std::byte *x, *scales;           ///< copies
  std::int32_t *count, *src;       ///< copies
  std::int32_t *failed, *expired;  ///< words that said that the call has failed; that said nothing in time
};

}  // namespace deep_ep::consumers

DEEP_EP_DECLARE_KERNEL(copy_arrivals, deep_ep::consumers::ArrivalsParams, 128)
