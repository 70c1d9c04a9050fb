// A stream of an executor for as long as the object lives.
#pragma once

#include <memory>

#include "deep_ep/executor.hpp"

namespace deep_ep {

struct OwnStream : std::shared_ptr<void> {
  /// The executor outlives it.
  explicit OwnStream(Executor& executor)
      : shared_ptr(executor.create_stream(), [&executor](StreamHandle stream) { executor.destroy_stream(stream); }) {}
  operator StreamHandle() const { return get(); }
};

}  // namespace deep_ep
