// How the ranks of a buffer find each other: by one collective, an all-gather.
#pragma once
// SPDX-License-Identifier: MIT

#include "deep_ep/standard.hpp"

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace deep_ep {

/// A group of ranks that exchange small messages on the host. Used at set-up and tear-down only.
///
/// All calls are collective: every rank makes them in the same order. One thread at a time per object. After a
/// TimeoutError make a new group. Programs may derive classes of their own.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  /// This rank, 0 to size() - 1.
  virtual int rank() const = 0;
  /// The number of ranks, equal on all of them.
  virtual int size() const = 0;

  /// Gathers every rank's bytes.
  /// @param mine this rank's bytes, the same number on every rank; it may be 0.
  /// @return size() * mine.size() bytes, rank 0's first.
  /// @throws TimeoutError if a rank does not come in time.
  virtual std::vector<std::byte> all_gather(std::span<const std::byte> mine) = 0;

  /// Returns after every rank has entered it. Throws as all_gather does.
  virtual void barrier();

 private:
  friend class BufferExchanges;
  std::shared_ptr<class BuffersOfGroup> buffers_;  // that were made over it
};

// `timeout_s` is the number of seconds that a rank waits for the others, in each call and while the group is made. 0:
// for ever. Unset: default_timeout_s(). InvalidArgument if it is negative or not finite.

/// Seconds, of the environment variable DEEP_EP_TIMEOUT_S; 100 if it is not set. InvalidArgument if it is no such
/// number.
double default_timeout_s();

/// Ranks are threads of this process, or processes that it forks afterwards.
/// @param size number of ranks, 1 or more. @return one bootstrap for each of them, rank 0's first.
std::vector<std::shared_ptr<Bootstrap>> make_thread_bootstraps(int size, std::optional<double> timeout_s = {});

/// The program's own all-gather: gets this rank's bytes and the place for those of all ranks, rank 0's first. It throws
/// on failure, and must limit its own waiting, for example to default_timeout_s(), as nothing interrupts it.
using AllGatherFunction = std::function<void(std::span<const std::byte> mine, std::span<std::byte> all)>;
/// @param rank this rank, 0 to size - 1. @param size number of ranks, 1 or more.
/// @param all_gather called by one thread at a time, for as long as the bootstrap lives.
std::shared_ptr<Bootstrap> make_callback_bootstrap(int rank, int size, AllGatherFunction all_gather);

/// Over MPI; in the library `deep_ep::mpi`. Collective. Initialises MPI if the program has not.
/// @param communicator points to an MPI_Comm, which the bootstrap duplicates; nullptr: MPI_COMM_WORLD.
std::shared_ptr<Bootstrap> make_mpi_bootstrap(const void* communicator = nullptr, std::optional<double> timeout_s = {});

/// Over the program's NCCL communicator; in the library `deep_ep::nccl`. Collective.
/// @param communicator a live ncclComm_t, which stays the caller's and must outlive the bootstrap.
std::shared_ptr<Bootstrap> make_nccl_bootstrap(void* communicator, std::optional<double> timeout_s = {});

}  // namespace deep_ep
