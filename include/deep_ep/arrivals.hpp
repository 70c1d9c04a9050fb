// Arrival counters tell a kernel, while a low-latency dispatch still receives, which rows are complete.
//
// The caller gives low_latency_dispatch a tensor of int64 words, one for each arrival_rows rows of recv_x. A call adds
// exactly kArrivalStep to every word, in several parts; the last part completes the multiple. So, with words that were
// zero at first,
//
//   word >= n * kArrivalStep   all rows of the word have arrived in the n-th call that was given this tensor
//   word < 0                   a call has failed: rows may never come, and the words mean nothing from then on
//
// Words without rows (after recv_count) are complete as soon as the counts are known.
//
// Order: a warp of the dispatch stores its part of a row (payload, scales, src_info), then adds to the word with
// release at GPU scope. The same words release the counts (recv_count, layout_range). So a thread that loads the word
// with acquire at GPU scope (ld.acquire.gpu) or wider, and finds it complete, sees those rows and the counts, and so do
// the threads that it then synchronises with. Copies by TMA need a fence.proxy.async.global in between, in the thread
// that acquired or in the one that copies.
//
// The library resets nothing, so a graph can replay calls. Consumers count calls (in device memory if a graph replays
// them), or zero the words after the call and before the next one. One tensor serves one call at a time: the next call
// with it must come after this one and after the kernels that poll for this one.
#pragma once
// SPDX-License-Identifier: MIT

#include <cstdint>
#include <limits>

namespace deep_ep {

/// The amount that a call adds to every word.
constexpr std::int64_t kArrivalStep = std::int64_t{1} << 24;
/// The value to which a call that fails sets the words.
constexpr std::int64_t kArrivalFailed = std::numeric_limits<std::int64_t>::min();

}  // namespace deep_ep
