// For tests that run a kernel of their own on every executor that is present.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "csrc/executor/kernel_table.hpp"
#include "deep_ep/executor.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::test {

/// The launchers of one test kernel: TestKernel<Params>(DEEP_EP_TEST_LAUNCHERS(name)).
template <class Params>
class TestKernel {
 public:
  TestKernel(Launcher<Params> host, Launcher<Params> cuda) : host_(host), cuda_(cuda) {}

  void operator()(Executor& executor, StreamHandle stream, const LaunchShape& shape, const Params& params) const {
    (executor.device().kind == Device::Kind::cuda ? cuda_ : host_)(params, shape, stream);
  }

 private:
  Launcher<Params> host_;
  Launcher<Params> cuda_;
};

#if DEEP_EP_HAVE_CUDA
#define DEEP_EP_TEST_LAUNCHERS(name) deep_ep::kernels::name::launch_host, deep_ep::kernels::name::launch_cuda
#else
#define DEEP_EP_TEST_LAUNCHERS(name) deep_ep::kernels::name::launch_host, nullptr
#endif

/// The executors of this machine: the host's under this seed and, with a GPU, CUDA's.
inline std::vector<std::shared_ptr<Executor>> executors_present(std::uint64_t seed = 0) {
  std::vector<std::shared_ptr<Executor>> all = {make_host_executor({.seed = seed})};
  if (cuda_device_count() > 0) all.push_back(make_cuda_executor(0));
  return all;
}

/// Calls `test` for every executor present, and for the host's under further seeds.
template <class Test>
void on_every_executor(Test test) {
  constexpr std::uint64_t kSeeds = DEEP_EP_TSAN ? 8 : 60;
  for (const auto& executor : executors_present()) {
    SCOPED_TRACE(to_string(executor->device()));
    test(*executor);
  }
  for (std::uint64_t seed = 1; seed < kSeeds && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("host, seed " + std::to_string(seed));
    test(*make_host_executor({.seed = seed}));
  }
}

template <class Params>
void run(Executor& executor, const TestKernel<Params>& kernel, const LaunchShape& shape, const Params& params) {
  const StreamHandle stream = executor.create_stream();
  kernel(executor, stream, shape, params);
  executor.synchronize(stream);
  executor.destroy_stream(stream);
}

/// `count` zeroed elements, or these, that host and kernels see at the same address.
template <class T>
class Shared {
 public:
  Shared(Executor& executor, std::size_t count)
      : executor_(executor), count_(count), data_(static_cast<T*>(executor.allocate_pinned(count * sizeof(T)))) {}
  Shared(Executor& executor, const std::vector<T>& values) : Shared(executor, values.size()) {
    std::copy(values.begin(), values.end(), data_);
  }
  ~Shared() { executor_.free_pinned(data_); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  T* data() const { return data_; }
  T& operator[](std::size_t i) const { return data_[i]; }
  std::vector<T> read() const { return {data_, data_ + count_}; }

 private:
  Executor& executor_;
  std::size_t count_;
  T* data_;
};

}  // namespace deep_ep::test
