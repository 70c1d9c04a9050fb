// How the ranks of a buffer find each other: one collective, all-gather, from which everything else is built.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace deep_ep {

/// A group of ranks that can exchange small messages on the host. Used at set-up and tear-down only.
/// All calls are collective: every rank makes them in the same order. One thread at a time per object.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Gathers `mine` (the same number of bytes on every rank) and returns size() * mine.size() bytes, rank 0 first.
  /// Throws TimeoutError when a rank does not come (where the transport can tell), RankMismatch for unequal sizes.
  virtual std::vector<std::byte> all_gather(std::span<const std::byte> mine) = 0;

  /// Returns after every rank has entered it.
  virtual void barrier();
};

/// One bootstrap for each of `size` ranks that live as threads of this process.
/// `timeout_s` bounds how long a rank waits for the others; 0 waits for ever.
std::vector<std::shared_ptr<Bootstrap>> make_thread_bootstraps(int size, double timeout_s = 100);

/// Ranks are processes of this host that agree on `name` (letters, digits, '-', '_'); they meet in POSIX shared memory.
std::shared_ptr<Bootstrap> make_shared_memory_bootstrap(const std::string& name, int rank, int size,
                                                        double timeout_s = 100);

/// The user's own all-gather: called with this rank's bytes and the place for everybody's bytes (rank 0 first).
/// Report failure by throwing.
using AllGatherFunction = std::function<void(std::span<const std::byte> mine, std::span<std::byte> all)>;
std::shared_ptr<Bootstrap> make_callback_bootstrap(int rank, int size, AllGatherFunction all_gather);

/// Over MPI. In library `deep_ep::mpi`. `communicator` points to an MPI_Comm, which must outlive the bootstrap;
/// nullptr means MPI_COMM_WORLD. Initialises MPI if the program has not.
std::shared_ptr<Bootstrap> make_mpi_bootstrap(const void* communicator = nullptr);

/// Over NCCL. In library `deep_ep::nccl`. The current CUDA device is the rank's.
/// From the 128 bytes of an ncclUniqueId that every rank got from rank 0 (`make_nccl_unique_id`):
std::shared_ptr<Bootstrap> make_nccl_bootstrap(std::span<const std::byte> unique_id, int rank, int size);
/// From a live ncclComm_t, which stays the caller's and must outlive the bootstrap:
std::shared_ptr<Bootstrap> make_nccl_bootstrap(void* communicator);
std::vector<std::byte> make_nccl_unique_id();

}  // namespace deep_ep
