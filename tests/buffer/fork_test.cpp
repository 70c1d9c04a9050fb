// A child forked after a buffer was made has none of its threads, and shares memory with its peers.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <utility>

#include "deep_ep/buffer.hpp"
#include "tests/support/child_process.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep {
namespace {

struct Forked {
  std::shared_ptr<Executor> executor = make_host_executor();
  std::optional<Buffer> buffer;
  Tensor in_heap;
  DispatchLayout layout;
  std::int64_t idx[4] = {0, 1, -1, 3};

  Forked() {
    BufferOptions options;
    options.heap_bytes = std::size_t{16} << 20;
    options.low_latency.bytes = Buffer::low_latency_bytes_hint(4, 128, 1, 4);
    buffer.emplace(make_thread_bootstraps(1).front(), executor, options);
    in_heap = buffer->allocate_tensor(DType::uint8, {100});
    layout = buffer->get_dispatch_layout(ConstTensorView::contiguous(idx, DType::int64, {2, 2}), 4);
    buffer->check();
  }
};

/// 0: each call threw at once, and everything could be destroyed.
int use_and_destroy(Forked& inherited) {
  int missed = 0;
  const auto refused = [&](auto&& call, const char* word) {
    try {
      call();
      ++missed;
    } catch (const Error& error) {
      if (std::string(error.what()).find(word) == std::string::npos) ++missed;
    }
  };
  Buffer& buffer = *inherited.buffer;
  refused([&] { buffer.check(); }, "Buffer::check in a child forked");
  refused([&] { buffer.destroy(); }, "Buffer::destroy in a child forked");
  refused([&] { buffer.allocate_tensor(DType::uint8, {1}); }, "forked");
  refused([&] { buffer.low_latency_clean(); }, "forked");
  refused([&] { buffer.describe(); }, "forked");
  refused([&] { inherited.executor->synchronize(nullptr); }, "an executor was used in a child forked");
  refused([&] { inherited.executor->record_event(nullptr); }, "forked");
  inherited.in_heap = {};
  inherited.layout = {};
  Buffer other = *std::exchange(inherited.buffer, std::nullopt);
  other = Buffer(make_thread_bootstraps(1).front(), make_host_executor());
  other.check();  // of this process
  inherited.executor.reset();
  return missed;
}

TEST(Fork, AChildIsRefusedAtOnceAndItsParentGoesOn) {
  if (test::under_thread_sanitizer()) GTEST_SKIP() << "ThreadSanitizer ends a forked child that starts threads";
  Forked forked;
  const pid_t child = test::fork_child();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(20);  // hanging is what this is about
    ::_exit(use_and_destroy(forked));
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "the child hung or crashed: signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0) << "calls that did not say what is wrong";
  forked.buffer->check();
  forked.buffer->destroy();
}

}  // namespace
}  // namespace deep_ep
