#include "deep_ep/arrivals.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/memory.hpp"
#include "tests/kernels/consumers/arrivals.hpp"

namespace deep_ep::device {
namespace {

/// Thread 0 waits, the others wait for it.
DEEP_EP_DEVICE void copy_arrivals(const consumers::ArrivalsParams& p, std::byte* shared) {
  auto& complete = *reinterpret_cast<std::int32_t*>(shared);
  for (int i = block_index(); i < p.blocks * p.words_of_block; i += grid_blocks()) {
    if (thread_index() == 0) {
      std::int64_t word = 0;
      const std::uint64_t begin = now_ns();
      const bool told = poll_until(
          [&](const Poll&) {
            word = load_acquire<Scope::gpu>(p.words + i);
            return word < 0 || word >= p.calls * kArrivalStep;
          },
          [&](const Poll&) { return now_ns() - begin > p.timeout_ns; });
      if (!told) add_relaxed<Scope::gpu>(p.expired, 1);
      if (told && word < 0) add_relaxed<Scope::gpu>(p.failed, 1);
      store_relaxed<Scope::block>(&complete, told && word >= 0 ? 1 : 0);
    }
    block::sync();
    const bool copies = load_relaxed<Scope::block>(&complete) != 0;
    const int block = i / p.words_of_block;
    const int first = i % p.words_of_block * p.rows_of_word;
    const int count = copies ? load_weak(p.recv_count + block) : 0;
    if (copies && first == 0 && thread_index() == 0) p.count[block] = count;
    const int end = count - first < p.rows_of_word ? count : first + p.rows_of_word;
    for (int row = first; row < end; ++row) {
      const std::int64_t at = std::int64_t{block} * p.rows + row;
      if (thread_index() == 0) p.src[at] = load_weak(p.src_info + at);
      for (int byte = 8 * thread_index(); byte < p.row_bytes; byte += 8 * block_threads()) {
        const std::int64_t from = at * p.row_bytes + byte;
        *reinterpret_cast<std::uint64_t*>(p.x + from) =
            load_weak(reinterpret_cast<const std::uint64_t*>(p.recv_x + from));
      }
      for (int column = thread_index(); column < p.scale_columns; column += block_threads()) {
        const std::int64_t word = (std::int64_t{block} * p.scale_columns + column) * p.rows + row;
        reinterpret_cast<std::uint32_t*>(p.scales)[word] =
            load_weak(reinterpret_cast<const std::uint32_t*>(p.recv_scales) + word);
      }
    }
    block::sync();
  }
}

}  // namespace
}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(copy_arrivals, deep_ep::device::copy_arrivals)
