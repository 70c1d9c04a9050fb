// Puts a kernel into a stream of the host machine.
#pragma once

#include <string>

#include "deep_ep/error.hpp"
#include "kernels/primitives/host/machine.hpp"

namespace deep_ep::host_machine {

template <class Params>
void launch(const char* name, const Params& params, const LaunchShape& shape, int max_threads, void* stream,
            void (*entry)(const void*, std::byte*)) {
  if (shape.blocks < 1 || shape.threads < 32 || shape.threads > max_threads || shape.threads % 32 != 0) {
    throw InvalidArgument("kernel " + std::string(name) + ": " + std::to_string(shape.blocks) + " blocks of " +
                          std::to_string(shape.threads) + " threads; a block has 32 to " + std::to_string(max_threads) +
                          " threads, a multiple of 32");
  }
  auto* queue = static_cast<LaunchQueue*>(stream);
  if (queue == nullptr) {
    const DefaultQueue find = default_queue.load(std::memory_order_acquire);
    if (find == nullptr) throw Error("kernel " + std::string(name) + ": there is no host executor");
    queue = &find();
  }
  queue->launch({name, shape, std::make_shared<const Params>(params), entry});
}

}  // namespace deep_ep::host_machine
