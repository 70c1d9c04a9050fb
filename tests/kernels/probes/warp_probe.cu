#include "kernels/primitives/block.hpp"
#include "kernels/primitives/warp.hpp"
#include "tests/kernels/probes/probes.hpp"

namespace deep_ep::device {
namespace {

DEEP_EP_DEVICE void warp_probe(const probes::WarpParams& p, std::byte*) {
  const int lane = lane_index();
  const auto u = static_cast<std::uint32_t>(lane);
  probes::WarpResult r{};
  r.shuffled8 = warp::shuffle(static_cast<std::uint8_t>(lane * 7), (lane + 1) % 32);
  r.shuffled16 = warp::shuffle(static_cast<std::uint16_t>(lane * 1000), 31 - lane);
  r.shuffled32 = warp::shuffle(u * 100000u, 5);
  r.shuffled64 = warp::shuffle((std::uint64_t{u} << 40) + u, (lane * 3) % 32);
  r.shuffled128 = warp::shuffle(Vec16{{u, u + 100, u + 200, u + 300}}, (lane + 16) % 32);
  r.shuffled_up = warp::shuffle_up(static_cast<float>(lane) + 0.5f, 3);
  r.shuffled_xor = warp::shuffle_xor(-lane, 6);
  r.ballot = warp::ballot(lane % 3 == 0);
  r.flags = static_cast<std::uint32_t>(warp::any(lane == 31)) | static_cast<std::uint32_t>(!warp::any(lane > 31)) << 1 |
            static_cast<std::uint32_t>(warp::all(lane < 32)) << 2 |
            static_cast<std::uint32_t>(!warp::all(lane != 17)) << 3;
  r.sum = warp::sum(lane - 20);
  r.sum64 = warp::sum(std::uint64_t{u} << 33);
  r.float_sum = warp::sum(1.0f / static_cast<float>(lane + 1));
  r.max = warp::max(lane == 9 ? 77 : -lane);
  r.min = warp::min(lane == 30 ? -5 : lane);
  r.float_max = warp::max(static_cast<float>(lane) * (lane % 2 == 0 ? 1.0f : -1.0f));
  r.min64 = warp::min(-(static_cast<std::int64_t>(lane) << 35));
  r.inclusive_sum = warp::inclusive_sum(lane);
  r.match = warp::match_any(u / 5);
  p.results[block_index() * block_threads() + thread_index()] = r;
}

}  // namespace
}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(warp_probe, deep_ep::device::warp_probe)
