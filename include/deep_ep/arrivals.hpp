// Arrival counters: how a kernel finds out, while a low-latency dispatch still receives, which rows are there.
//
// The caller gives low_latency_dispatch a tensor of int64 words, one for each so many rows of recv_x (arrival_rows). A
// call adds exactly kArrivalStep to every word, in several parts; the word reaches the next multiple with the last of
// them. So, with words that were zero at first,
//
//   word >= n * kArrivalStep   all rows of the word have arrived in the n-th call that was given this tensor
//   word < 0                   a call has failed: rows may never come, and the words mean nothing from then on
//
// Words without rows (behind recv_count) are complete as soon as the counts are known.
//
// Order: a warp of the dispatch stores its part of a row (payload, scales, src_info, indices and weights), then adds to
// the word with release at GPU scope. What the call writes of counts (recv_count, layout_range) is released by the same
// words. So a thread that loads the word with acquire at GPU scope (ld.acquire.gpu) or wider, and finds it complete,
// sees those rows and the counts. Threads that it synchronises with see them, too. Copies by TMA need a
// fence.proxy.async.global in between, in the thread that acquired or in the one that copies.
//
// Nothing is reset by the library, so calls can be replayed in a graph. Consumers count calls, in device memory if they
// are replayed themselves; or zero the words, behind the call in stream order and before the next one with the same
// words is enqueued. One tensor is given to one call at a time: the next call with it must be behind this one, and
// behind kernels that still poll for this one.
#pragma once

#include <cstdint>
#include <limits>

namespace deep_ep {

/// The amount that a call adds to every word.
constexpr std::int64_t kArrivalStep = std::int64_t{1} << 24;
/// The value to which a call that fails sets the words.
constexpr std::int64_t kArrivalFailed = std::numeric_limits<std::int64_t>::min();

}  // namespace deep_ep
