// Two threads that call one buffer.
#include <chrono>
#include <exception>
#include <functional>
#include <string>
#include <thread>

#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class OneThreadTest : public ClusterTest {};
DEEP_EP_ON_THREADS(OneThreadTest);

/// Calls until no other thread is in a call.
void call_in_turn(const std::function<void()>& call) {
  for (;;) {
    try {
      return call();
    } catch (const Error& error) {
      if (std::string(error.what()).find("in use by another thread") == std::string::npos) throw;
    }
    std::this_thread::yield();
  }
}

TEST_P(OneThreadTest, ASecondOneIsRefusedAtOnce) {
  const Case one = make_case({.tokens = {8, 9}});
  run_with_buffers(cluster(2), [&](Rank& rank, Buffer& buffer) {
    const Inputs inputs = upload_inputs(rank, one);
    const CallOptions call = rank.call();
    DispatchResult result;
    if (rank.rank() == 0) {
      // It stays in the call until rank 1 comes, who waits for what this thread sees.
      std::exception_ptr failed;
      std::thread other([&] {
        try {
          call_in_turn([&] { result = buffer.dispatch(inputs.dispatch, call); });
        } catch (...) {
          failed = std::current_exception();
        }
      });
      std::string text;
      const auto begin = std::chrono::steady_clock::now();
      while (text.empty() && std::chrono::steady_clock::now() - begin < std::chrono::duration<double>(patience())) {
        try {
          buffer.check();
        } catch (const Error& error) {
          text = error.what();
        }
        std::this_thread::yield();
      }
      rank.bootstrap()->barrier();
      other.join();
      if (failed) std::rethrow_exception(failed);
      require(
          text == "check: the buffer is in use by another thread, which is in dispatch, allowed: one thread at a time",
          "a call beside that of another thread says '" + text + "'");
    } else {
      rank.bootstrap()->barrier();
      result = buffer.dispatch(inputs.dispatch, call);
    }
    check_dispatch(rank, one, result);
    run_round(rank, buffer, one);  // by another thread than before
  });
}

}  // namespace
}  // namespace deep_ep::test
