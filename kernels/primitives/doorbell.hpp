// The store that rings a device's doorbell register.
#pragma once

#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/target.hpp"

namespace deep_ep::device {

/// One 8-byte store to a device register that is mapped into this GPU; never split, merged or repeated. Orders nothing:
/// put a fence before it, at the scope of whoever reads what the doorbell announces.
DEEP_EP_DEVICE void store_doorbell(std::uint64_t* reg, std::uint64_t value) {
#if DEEP_EP_TARGET_CUDA
  asm volatile("st.mmio.relaxed.sys.global.u64 [%0], %1;" ::"l"(reg), "l"(value) : "memory");
#else
  host_machine::store(reg, value, __ATOMIC_RELAXED);
#endif
}

}  // namespace deep_ep::device
