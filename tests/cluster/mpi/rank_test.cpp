// Rounds on as many ranks as mpirun starts, one process per rank:
//
//   mpirun -n 8 deep_ep_rank_test [--host | --cuda] [--nccl]
//
// Rank i of a host takes its GPU i; unless each has a GPU, all ranks run on the CPU. With --nccl the ranks find each
// other through NCCL instead of MPI. Ends with 0 when every round of every rank matched the oracle.
#include <mpi.h>
#ifdef DEEP_EP_TEST_NCCL
#include <nccl.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/cluster/exchange.hpp"

namespace deep_ep::test {
namespace {

constexpr int kRounds = 4;

struct Options {
  bool host = false, cuda = false, nccl = false;
};

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string name = arguments[i];
    bool* const option = name == "--host"   ? &options.host
                         : name == "--cuda" ? &options.cuda
                         : name == "--nccl" ? &options.nccl
                                            : nullptr;
    if (option == nullptr) {
      std::fprintf(stderr, "unknown argument %s\nusage: deep_ep_rank_test [--host | --cuda] [--nccl]\n", arguments[i]);
      std::exit(2);
    }
    *option = true;
  }
  return options;
}

/// This process's number among those of its host.
int rank_on_host() {
  MPI_Comm host = MPI_COMM_NULL;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  int rank = 0;
  MPI_Comm_rank(host, &rank);
  MPI_Comm_free(&host);
  return rank;
}

/// True when every rank says so.
bool everywhere(bool here) {
  int mine = here ? 1 : 0;
  int all = 0;
  MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  return all == 1;
}

std::shared_ptr<Bootstrap> make_bootstrap([[maybe_unused]] int rank, [[maybe_unused]] int ranks, bool nccl) {
  if (!nccl) return make_mpi_bootstrap();
#ifdef DEEP_EP_TEST_NCCL
  static ncclComm_t communicator = nullptr;  // until the process ends
  ncclUniqueId id{};
  if (rank == 0) ncclGetUniqueId(&id);
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  if (ncclCommInitRank(&communicator, ranks, id, rank) != ncclSuccess) throw SystemError("ncclCommInitRank failed");
  return make_nccl_bootstrap(communicator);
#else
  throw InvalidArgument("--nccl: built without NCCL");
#endif
}

/// Empty when all rounds matched.
std::string run(const Options& options, int rank, int ranks) {
  const int local = rank_on_host();
  const bool cuda = everywhere(cuda_device_count() > local) && !options.host;
  if (options.cuda && !cuda) return "--cuda: some host has fewer GPUs than ranks";
  ClusterOptions cluster{
      .ranks = ranks, .where = {cuda ? Target::cuda : Target::host, Placement::processes}, .host = {}};
  cluster.host = {.multiprocessors = 2, .warps_per_block = 2};
  try {
    const auto executor = cuda ? make_cuda_executor(local) : make_host_executor(cluster.host);
    executor->make_current();  // NCCL takes the current GPU
    Rank self(rank, cluster, make_bootstrap(rank, ranks, options.nccl), executor);
    Buffer& buffer = self.buffer();
    oracle::Random random(1);  // the same on all ranks
    for (int round = 0; round < kRounds; ++round) {
      const Case one = make_case(random_shape(random, ranks));
      for (const bool heap : {true, false}) run_round(self, buffer, one, {.num_sms = 0, .returned_in_heap = heap});
      self.release();
    }
    buffer.destroy();
  } catch (const std::exception& error) {
    return error.what();
  }
  if (rank == 0) std::printf("%d ranks on %s: %d rounds match\n", ranks, cuda ? "GPUs" : "the CPU", kRounds);
  return {};
}

}  // namespace
}  // namespace deep_ep::test

int main(int count, char** arguments) {
  using namespace deep_ep::test;
  const Options options = parse(count, arguments);
  MPI_Init(&count, &arguments);
  int rank = 0;
  int ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const std::string failure = run(options, rank, ranks);
  if (!failure.empty()) {
    std::fprintf(stderr, "rank %d: %s\n", rank, failure.c_str());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return 0;
}
