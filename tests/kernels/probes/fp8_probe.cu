#include "tests/kernels/probes/fp8_probe.hpp"

#include "kernels/primitives/numeric.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device {
namespace {

DEEP_EP_DEVICE void fp8_probe(const probes::Fp8Params& p, std::byte*) {
  for (int i = thread_index(); i < p.count / 2; i += block_threads()) {
    p.pairs[i] = pack_e4m3(p.values[2 * i], p.values[2 * i + 1]);
  }
  for (int i = thread_index(); i < p.count; i += block_threads()) {
    const float amax = float_from_bits(bits_of(p.values[i]) & 0x7fffffffu);
    const Fp8Scale plain = fp8_scale(amax, false);
    const Fp8Scale rounded = fp8_scale(amax, true);
    p.multiplier[i] = plain.multiplier;
    p.inverse[i] = plain.inverse;
    p.rounded_multiplier[i] = rounded.multiplier;
    p.rounded_inverse[i] = rounded.inverse;
    p.aligned[i] = aligned_fp8_scale(amax);
  }
}

}  // namespace
}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(fp8_probe, deep_ep::device::fp8_probe)
