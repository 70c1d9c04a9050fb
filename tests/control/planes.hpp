// Planes of the control plane within one process: each of them is a process of its own to the others, and "dies" when
// it goes without a goodbye. So ThreadSanitizer sees all of it.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "csrc/control/membership.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::control::test {

/// Waits until it is so, but no longer than the tests' patience.
inline bool eventually(const std::function<bool()>& is_so) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(deep_ep::test::patience());
  while (!is_so()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

/// The words that waits of a rank read and write.
struct SharedWords : ControlWords {
  static constexpr std::size_t kRanks = 8;
  SharedWords() : ControlWords{} {}

  std::uint32_t verdicts() const { return __atomic_load_n(&changes, __ATOMIC_ACQUIRE); }
  /// The rank that this one is lost for.
  int lost_for(int rank) const { return control::lost_for(*this, rank); }
  void end_wait_for(int rank) { __atomic_store_n(&ended, static_cast<std::uint32_t>(rank) + 1, __ATOMIC_RELEASE); }
  /// As a kernel says while it waits.
  void say_waits(int peer, std::chrono::nanoseconds lasted) {
    const auto p = static_cast<std::size_t>(peer);
    __atomic_store_n(&waits[p], static_cast<std::uint64_t>(lasted.count()), __ATOMIC_RELAXED);
    __atomic_fetch_add(&beats[p], 1, __ATOMIC_RELAXED);
  }
  void fail_queue_to(int peer) { __atomic_store_n(&failed[static_cast<std::size_t>(peer)], 1, __ATOMIC_RELAXED); }
};

inline Settings settings(bool on = true) { return {.on = on, .ports = {}, .connect_s = deep_ep::test::patience()}; }
/// By TCP it is as if each plane had a network of its own.
inline ProcessInfo info_of(Plane& plane, int number, bool by_unix) {
  ProcessInfo info = plane.info(!by_unix);
  if (!by_unix) info.identity.network_namespace = static_cast<std::uint64_t>(number) + 1;
  return info;
}

class Planes {
 public:
  Planes(int number, bool by_unix) : by_unix_(by_unix) {
    for (int i = 0; i < number; ++i) planes_.push_back(std::make_shared<Plane>(settings()));
  }
  ~Planes() {
    for (const auto& plane : planes_) plane->stop();
  }
  Planes(const Planes&) = delete;
  Planes& operator=(const Planes&) = delete;

  Plane& operator[](int plane) { return *planes_[static_cast<std::size_t>(plane)]; }
  /// Without a goodbye.
  void end(int plane) { (*this)[plane].stop(); }
  ProcessInfo info(int plane) { return info_of((*this)[plane], plane, by_unix_); }

  /// A buffer of these planes, one rank each: the members, the words, and the exceptions of the ranks.
  struct Buffer {
    explicit Buffer(std::size_t ranks) : words(ranks), members(ranks), errors(ranks) {}
    Membership& operator[](int rank) const { return *members[static_cast<std::size_t>(rank)]; }
    void leave(int rank) { members[static_cast<std::size_t>(rank)].reset(); }
    std::vector<SharedWords> words;
    std::vector<std::unique_ptr<Membership>> members;
    std::vector<std::string> errors;
  };
  /// `planes`: of each rank; -1: the rank is none of these planes. They look at the words as long as they live.
  Buffer& join(std::uint64_t number, const std::vector<int>& planes, const std::vector<ProcessInfo>& infos,
               const JoinOptions& options = {}) {
    Buffer& buffer = buffers_.emplace_back(planes.size());
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < planes.size(); ++rank) {
      if (planes[rank] < 0) continue;
      threads.emplace_back([&, rank] {
        try {
          buffer.members[rank] =
              std::make_unique<Membership>(planes_[static_cast<std::size_t>(planes[rank])], number,
                                           static_cast<int>(rank), infos, buffer.words[rank], options);
        } catch (const std::exception& error) {
          buffer.errors[rank] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& error : buffer.errors) EXPECT_EQ(error, "");
    return buffer;
  }
  Buffer& join(std::uint64_t number, const std::vector<int>& planes, const JoinOptions& options = {}) {
    std::vector<ProcessInfo> infos;
    for (const int plane : planes) infos.push_back(info(plane));
    return join(number, planes, infos, options);
  }

 private:
  bool by_unix_;
  std::deque<Buffer> buffers_;
  std::vector<std::shared_ptr<Plane>> planes_;
};

}  // namespace deep_ep::control::test
