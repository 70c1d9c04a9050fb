// The launchers of one target. The same kernels exist for every executor; the table is how the rest of the library,
// which knows neither CUDA nor fibers, starts them.
#pragma once

#include "kernels/kernel_list.hpp"

namespace deep_ep {

template <class Params>
using Launcher = void (*)(const Params&, const LaunchShape&, void* stream);

/// One member a kernel, of the kernel's name.
struct KernelTable {
#define DEEP_EP_MEMBER(name, Params, max_threads) Launcher<Params> name = nullptr;
  DEEP_EP_KERNELS(DEEP_EP_MEMBER)
#undef DEEP_EP_MEMBER
};

/// A kernel that a plan has chosen, and the threads of its largest block.
template <class Params>
struct KernelChoice {
  Launcher<Params> KernelTable::*launcher;
  int max_threads;
};
/// Each kernel to choose, by its name.
namespace choices {
#define DEEP_EP_CHOICE(name, Params, max_threads) \
  inline constexpr KernelChoice<Params> name = {&KernelTable::name, max_threads};
DEEP_EP_KERNELS(DEEP_EP_CHOICE)
#undef DEEP_EP_CHOICE
}  // namespace choices

/// Defined by the executor of the CPU.
const KernelTable& host_kernels();

}  // namespace deep_ep
