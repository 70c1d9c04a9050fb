// One executor per GPU for the whole process: events cross from one buffer to another.
#pragma once

#include <memory>

#include "deep_ep/executor.hpp"

namespace deep_ep::bindings {

/// Made at the first call for a device, never destroyed: at interpreter exit other objects may still need it.
std::shared_ptr<Executor> gpu_executor(int device);

}  // namespace deep_ep::bindings
