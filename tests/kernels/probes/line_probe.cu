#include "kernels/common/wait.hpp"
#include "kernels/primitives/line.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"
#include "tests/kernels/probes/probes.hpp"

namespace deep_ep::device {
namespace {

/// What word `at` of the row is in a round.
DEEP_EP_DEVICE std::uint64_t line_word(std::uint64_t round, std::uint32_t at) {
  return (round * 0x9e3779b97f4a7c15u) ^ (at * 0xbf58476d1ce4e5b9u);
}

/// Block 0 sends a row in tagged lines, block 1 polls them: warps share its lines.
DEEP_EP_DEVICE void line_probe(const probes::LineParams& p, std::byte*) {
  const LineLane lane;
  std::uint64_t wrong = 0;
  for (int round = 1; round <= p.rounds; ++round) {
    const auto tag = static_cast<std::uint64_t>(round);
    const std::uint64_t read_before = (tag - 1) * static_cast<std::uint64_t>(block_warps());
    if (block_index() == 0) {
      for (int spins = 0; load_acquire<Scope::gpu>(p.read) < read_before; ++spins) pause(spins);
    }
    for (int first = warp_index() * kWarpLines; first < p.lines; first += block_warps() * kWarpLines) {
      const auto line = static_cast<std::uint32_t>(first + lane.line);
      const bool wanted = static_cast<int>(line) < p.lines;
      std::byte* at = p.row + lane.byte_at(line);
      const Cell sent{line_word(tag, lane.payload_at(line)),
                      lane.has_tag() ? tag : line_word(tag, lane.payload_at(line) + 8)};
      if (block_index() == 0) {
        store_line(at, sent, wanted);
        continue;
      }
      // Two pieces: this one, and the row's first line, as whoever receives rows needs a header, too.
      LinePoller<2> lines;
      poll_until(
          [&](const Poll& poll) {
            return lines.poll(
                poll.thorough, [&](int) { return tag; }, [&](int i) { return i == 0 ? at : p.row + lane.byte_at(0); },
                [&](int i) { return i == 0 ? wanted : lane.line == 0; });
          },
          [](const Poll&) { return false; });
      const Cell& seen = lines.part[0];
      if (wanted && (seen.payload != sent.payload || seen.epoch != sent.epoch)) ++wrong;
      if (lane.line == 0 && lines.part[1].payload != line_word(tag, lane.payload_at(0))) ++wrong;
    }
    warp::sync();
    if (block_index() == 1 && lane_index() == 0) add_release<Scope::gpu>(p.read, std::uint64_t{1});
  }
  if (wrong != 0) add_relaxed<Scope::gpu>(p.results, wrong);
}

}  // namespace
}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(line_probe, deep_ep::device::line_probe)
