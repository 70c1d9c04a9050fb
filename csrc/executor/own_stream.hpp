// A stream of an executor for as long as the object lives.
#pragma once

#include "deep_ep/executor.hpp"

namespace deep_ep {

class OwnStream {
 public:
  /// The executor outlives it.
  explicit OwnStream(Executor& executor) : executor_(executor), stream_(executor.create_stream()) {}
  ~OwnStream() { executor_.destroy_stream(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  StreamHandle get() const { return stream_; }

 private:
  Executor& executor_;
  StreamHandle stream_;
};

}  // namespace deep_ep
