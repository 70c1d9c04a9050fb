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
#include <cstring>
#include <string>

#include "tests/cluster/exchange.hpp"

namespace deep_ep::test {
namespace {

constexpr int kRounds = 4;
constexpr std::int64_t kTokens = 24;
constexpr std::int64_t kHidden = 512;

struct Options {
  enum class Place { automatic, host, cuda } place = Place::automatic;
  bool nccl = false;
};

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string name = arguments[i];
    if (name == "--host") {
      options.place = Options::Place::host;
    } else if (name == "--cuda") {
      options.place = Options::Place::cuda;
    } else if (name == "--nccl") {
      options.nccl = true;
    } else {
      std::fprintf(stderr, "unknown argument %s\nusage: deep_ep_rank_test [--host | --cuda] [--nccl]\n", arguments[i]);
      std::exit(2);
    }
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

Shape shape_of_round(int round, int ranks) {
  Shape shape;
  shape.seed = static_cast<std::uint64_t>(round) + 1;
  shape.tokens = oracle::make_token_counts(round % 2 == 0 ? oracle::TokenCounts::equal : oracle::TokenCounts::different,
                                           ranks, kTokens, shape.seed);
  shape.local_experts = 8;
  shape.topk = 8;
  shape.routing = round % 3 == 2 ? oracle::Routing::skewed : oracle::Routing::some_dropped;
  shape.hidden = kHidden;
  if (round % 2 == 1) {
    shape.dtype = DType::float8_e4m3;
    shape.scales = 4;
    shape.scale_layout = ScaleLayout::column_major;
  }
  shape.combine_hidden = kHidden;
  shape.bias_0 = round % 4 == 3;
  return shape;
}

/// Empty when all rounds matched.
std::string run(const Options& options, int rank, int ranks) {
  const int local = rank_on_host();
  const bool enough_gpus = everywhere(cuda_device_count() > local);
  if (options.place == Options::Place::cuda && !enough_gpus) return "--cuda: some host has fewer GPUs than ranks";
  const bool cuda = enough_gpus && options.place != Options::Place::host;
  const auto row_bytes = static_cast<std::size_t>(kHidden) * 2;
  ClusterOptions cluster{
      .ranks = ranks, .where = {cuda ? Target::cuda : Target::host, Placement::processes}, .host = {}};
  cluster.host = {.multiprocessors = 2, .warps_per_block = 2};
  try {
    const auto executor = cuda ? make_cuda_executor(local) : make_host_executor(cluster.host);
    executor->make_current();  // NCCL takes the current GPU
    Rank self(rank, cluster, make_bootstrap(rank, ranks, options.nccl), executor);
    // Room for the received rows, for the experts' outputs, and the same again.
    const std::size_t rows = static_cast<std::size_t>(ranks) * static_cast<std::size_t>(kTokens) * row_bytes;
    Buffer& buffer = self.buffer({.heap_bytes = (std::size_t{64} << 20) + 4 * rows});
    for (int round = 0; round < kRounds; ++round) {
      const Case one = make_case(shape_of_round(round, ranks));
      for (const bool heap : {true, false}) run_round(self, buffer, one, {.config = {}, .returned_in_heap = heap});
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
