// Ranks may be masked while a call runs, by the waits of this very call. Then some blocks have received with a rank and
// others without it, and the last block to finish receives again, alone, with those that are left. What they sent is
// all there: whoever a block waited for in vain is masked.
#pragma once

#include "kernels/low_latency/transport/wait.hpp"
#include "kernels/primitives/block.hpp"

namespace deep_ep::device {

/// Words of shared memory that a block needs for it.
struct MaskWords {
  std::uint64_t version;     ///< of the masks, as the block saw them when it began
  std::int32_t last, again;  ///< see finish_with_masks
};

/// By one thread, before the block looks at any mask. Who saw a newer one than this version finds that out at the end.
DEEP_EP_DEVICE void note_masks(const LowLatencyParams& common, MaskWords& words) {
  words.version = common.mask == nullptr ? 0 : load_acquire<Scope::gpu>(&common.state->mask_version);
}

/// By every thread of the blocks that receive, when they have. `words.last`: all others have finished. `words.again`:
/// not everybody saw the same masks, and this block is to receive again.
DEEP_EP_DEVICE void finish_with_masks(const LowLatencyParams& common, LowLatencyCounters& counters, MaskWords& words) {
  block::sync();
  if (thread_index() == 0) {
    const auto blocks = static_cast<std::uint32_t>(common.working_blocks);
    add_relaxed<Scope::gpu>(&counters.versions, words.version);
    words.last = words.again = 0;
    if (fetch_add_acq_rel<Scope::gpu>(&counters.finished, std::uint32_t{1}) + 1 == blocks) {
      const std::uint64_t now = load_acquire<Scope::gpu>(&common.state->mask_version);
      words.last = 1;
      words.again = load_relaxed<Scope::gpu>(&counters.versions) == now * blocks ? 0 : 1;
      words.version = now;
      store_relaxed<Scope::gpu>(&counters.finished, 0);
      store_relaxed<Scope::gpu>(&counters.versions, 0);
    }
  }
  block::sync();
}

/// By every thread of the block that has received again. `words.again`: masks have changed since it began to.
DEEP_EP_DEVICE void compare_masks(const LowLatencyParams& common, MaskWords& words) {
  block::sync();
  if (thread_index() == 0) {
    const std::uint64_t now = load_acquire<Scope::gpu>(&common.state->mask_version);
    words.again = words.version == now ? 0 : 1;
    words.version = now;
  }
  block::sync();
}

}  // namespace deep_ep::device
