// The copy engine of a block: bulk copies that are done as late as the program allows (or, under a seed, earlier).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "machine/fiber.hpp"
#include "machine/random.hpp"
#include "machine/shared_memory.hpp"

namespace deep_ep::host_machine {

/// A load that was issued and whose bytes have not arrived. Kept by its mbarrier.
struct BulkLoad {
  Fiber* issuer;
  std::byte* shared;
  const std::byte* global;
  std::uint32_t bytes;
};

class BulkEngine {
 public:
  BulkEngine(SharedMemory& shared, Random& random, int threads)
      : shared_(shared), random_(random), threads_(static_cast<std::size_t>(threads)) {}

  /// Arguments as the GPU demands them; throws otherwise.
  void check(const char* what, const void* shared, const void* global, std::uint32_t bytes) const;

  /// Does the copy now.
  void execute(const BulkLoad& load);

  void store(Fiber& fiber, std::byte* global, const std::byte* shared, std::uint32_t bytes);
  void commit(const Fiber& fiber) { ++thread(fiber).open_group; }
  /// Reads the source of all but the latest `groups_left` committed groups: a late reader sees what came into a stage
  /// that was reused too early.
  void wait_read(Fiber& fiber, int groups_left);
  /// They are complete: the stage is read, and the bytes are on their way to memory. They get there at the fence, or
  /// when the kernel ends.
  void wait(Fiber& fiber, int groups_left);
  void fence(Fiber& fiber);
  /// The thread ends: stores whose source was not waited for are an error, the others are completed.
  void finish(Fiber& fiber);

 private:
  struct Store {
    std::byte* global;
    const std::byte* shared;
    std::uint32_t bytes;
    std::uint64_t group;
    bool waited = false;  ///< the program waited for the read (a seeded schedule may read and write unasked)
    bool read = false;
    std::vector<std::byte> buffer;  ///< what was read, until it is written
  };
  struct Thread {
    std::vector<Store> stores;  ///< in the order of issue
    std::size_t complete = 0;   ///< so many, from the first, have been waited for
    std::size_t written = 0;    ///< so many are in memory
    std::uint64_t open_group = 0;
  };

  Thread& thread(const Fiber& fiber) { return threads_[static_cast<std::size_t>(fiber.state.thread)]; }
  void read(Fiber& fiber, Store& store);
  void write(Fiber& fiber, Store& store);
  void write_first(Fiber& fiber, std::size_t stores);

  SharedMemory& shared_;
  Random& random_;
  std::vector<Thread> threads_;
};

}  // namespace deep_ep::host_machine
