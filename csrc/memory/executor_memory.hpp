// Memory of an executor that frees itself, and keeps the executor for that.
#pragma once

#include <cstddef>
#include <memory>

#include "deep_ep/executor.hpp"

namespace deep_ep {

/// Device memory with undefined contents.
template <class T>
std::shared_ptr<T> device_memory(const std::shared_ptr<Executor>& executor, std::size_t bytes = sizeof(T)) {
  return {static_cast<T*>(executor->allocate(bytes)), [executor](T* memory) { executor->free(memory); }};
}

/// Zero-filled memory that host and kernels share.
template <class T>
std::shared_ptr<T> pinned_memory(const std::shared_ptr<Executor>& executor, std::size_t bytes = sizeof(T)) {
  return {static_cast<T*>(executor->allocate_pinned(bytes)), [executor](T* memory) { executor->free_pinned(memory); }};
}

}  // namespace deep_ep
