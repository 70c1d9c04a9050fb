// For tests of the host machine: a kernel whose body is a lambda.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::test {

using KernelBody = std::function<void(std::byte* shared)>;

/// Enqueues the lambda as a kernel; every thread of the grid calls it.
inline void launch(StreamHandle stream, const LaunchShape& shape, KernelBody body, const char* name = "probe") {
  check_launch_shape(name, shape, 1024);
  const auto entry = [](const void* p, std::byte* shared) { (*static_cast<const KernelBody*>(p))(shared); };
  host_machine::enqueue({name, shape, std::make_shared<const KernelBody>(std::move(body)), entry}, stream);
}

/// An executor with one stream.
class Machine {
 public:
  explicit Machine(std::uint64_t seed = 0)
      : executor_(make_host_executor({.seed = seed})), stream_(executor_->create_stream()) {}
  ~Machine() { executor_->destroy_stream(stream_); }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  Executor& executor() { return *executor_; }
  StreamHandle stream() const { return stream_; }

  void run(const LaunchShape& shape, KernelBody body, const char* name = "probe") {
    launch(stream_, shape, std::move(body), name);
    executor_->synchronize(stream_);
  }
  /// The text of the failure of a kernel; empty if there was none.
  std::string failure_of(const LaunchShape& shape, KernelBody body) {
    try {
      run(shape, std::move(body));
    } catch (const Error& e) {
      return e.what();
    }
    return {};
  }

 private:
  std::shared_ptr<Executor> executor_;
  StreamHandle stream_;
};

}  // namespace deep_ep::test
