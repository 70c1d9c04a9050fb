// An executor as the library sees it: what it needs beyond what programs may call.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "csrc/executor/kernel_table.hpp"
#include "csrc/memory/symmetric_heap.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep {

/// Tells ranks that share a GPU. Plain data, exchanged between ranks.
struct DeviceIdentity {
  std::array<std::uint8_t, 16> uuid{};
  std::int32_t multiprocessors = 0;  ///< of the whole device; 0: one that ranks share as the operating system lets them
  std::int32_t kept = 0;             ///< of a rank's share, what kernels that play its NICs take
};

class Backend : public Executor {
 public:
  virtual const KernelTable& kernels() const = 0;
  /// Loads all kernels of the library that are not. A kernel that is loaded at its first launch waits for those that
  /// run, and these may wait for what only that launch would do.
  virtual void load_kernels() const = 0;
  virtual DeviceIdentity identity() const { return {}; }
  /// Can kernels of this one add atomically to memory of `device`? True for one that this process does not see.
  virtual bool adds_atomically_to(const DeviceIdentity& /*device*/) const { return true; }
  virtual std::unique_ptr<SymmetricHeap> create_heap(Bootstrap& bootstrap, const HeapBytes& bytes_for) = 0;
};

/// InvalidArgument for an executor that a program has made by itself: it has no kernels.
inline std::shared_ptr<Backend> backend_of(const std::shared_ptr<Executor>& executor) {
  if (executor == nullptr) throw InvalidArgument("executor is null");
  auto backend = std::dynamic_pointer_cast<Backend>(executor);
  if (backend == nullptr) {
    throw InvalidArgument("executor is of the program's own making, allowed: make_cuda_executor, make_host_executor");
  }
  return backend;
}

}  // namespace deep_ep
