// A round on as many ranks as mpirun starts, a GPU each, which meet through NCCL:
//
//   mpirun -n 8 deep_ep_nccl_test
#include <mpi.h>
#include <nccl.h>

#include <cstdio>

#include "tests/cluster/exchange.hpp"

int main(int count, char** arguments) {
  using namespace deep_ep;
  using namespace deep_ep::test;
  MPI_Init(&count, &arguments);
  int rank = 0;
  int ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  try {
    if (cuda_device_count() == 0) throw SystemError("this test needs a GPU");
    const auto executor = make_cuda_executor(rank % cuda_device_count());
    executor->make_current();  // NCCL takes the current GPU
    ncclComm_t communicator = nullptr;
    ncclUniqueId id{};
    if (rank == 0) ncclGetUniqueId(&id);
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    if (ncclCommInitRank(&communicator, ranks, id, rank) != ncclSuccess) throw SystemError("ncclCommInitRank failed");
    Rank self(rank, {.ranks = ranks, .where = {Target::cuda, Placement::processes}}, make_nccl_bootstrap(communicator),
              executor);
    Buffer& buffer = self.buffer();
    run_round(self, buffer, make_case({.tokens = equal_tokens(ranks, 16)}));
    buffer.destroy();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return 0;
}
