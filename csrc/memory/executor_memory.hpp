// Memory of an executor that frees itself, and keeps the executor for that.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "csrc/executor/own_stream.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep {

/// Device memory with undefined contents.
template <class T>
std::shared_ptr<T> device_memory(const std::shared_ptr<Executor>& executor, std::size_t bytes = sizeof(T)) {
  return {static_cast<T*>(executor->allocate(bytes)), [executor](T* memory) { executor->free(memory); }};
}

/// The host waits for it. The default stream would wait for, or spoil, what the program does meanwhile.
inline void copy_now(Executor& executor, void* to, const void* from, std::size_t bytes) {
  const OwnStream stream(executor);
  executor.copy(to, from, bytes, stream.get());
  try {
    executor.synchronize(stream.get());
  } catch (...) {
    log::quietly([&] { executor.synchronize(stream.get()); });  // the caller may free the memory
    throw;
  }
}

/// Device memory with a copy of these values.
template <class T>
std::shared_ptr<T> device_copy(const std::shared_ptr<Executor>& executor, const std::vector<T>& values) {
  std::shared_ptr<T> memory = device_memory<T>(executor, values.size() * sizeof(T));
  copy_now(*executor, memory.get(), values.data(), values.size() * sizeof(T));
  return memory;
}

/// Zero-filled memory that host and kernels share.
template <class T>
std::shared_ptr<T> pinned_memory(const std::shared_ptr<Executor>& executor, std::size_t bytes = sizeof(T)) {
  return {static_cast<T*>(executor->allocate_pinned(bytes)), [executor](T* memory) { executor->free_pinned(memory); }};
}

}  // namespace deep_ep
