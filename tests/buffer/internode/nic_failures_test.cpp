// Operations of a NIC that fail in calls between nodes.
#include "kernels/normal/params.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/queue_pairs_executor.hpp"

namespace deep_ep::test {
namespace {

class InternodeNicFailuresTest : public ClusterTest {};
DEEP_EP_ON_THREADS(InternodeNicFailuresTest);

/// Rank 2 gets no rows, or no credit, from its rail, rank 0. That one finds why while the call is under way, long
/// before a deadline; then the call is over for the others, too.
TEST_P(InternodeNicFailuresTest, TheRailIsNamedAndWhoWaitsSaysHowItsNicIs) {
  const Case one = make_case({.tokens = {100, 0, 200, 9}, .local_experts = 2, .ranks_per_node = 2, .seed = 1});
  for (const InternodeChannel channel : {InternodeChannel::rows, InternodeChannel::credit}) {
    run_cluster(cluster_with_absentees(4), [&](Rank& rank) {
      std::shared_ptr<Executor> executor = rank.executor();
      if (rank.rank() == 0) executor = spoiling_executor(executor, 4, int(InternodeChannel::count), int(channel), 2);
      // So little memory that each rank waits for credit.
      Buffer buffer(rank.bootstrap(), executor,
                    {.heap_bytes = std::size_t{8} << 20,
                     .window_bytes = std::size_t{24} << 10,
                     .timeout_s = 3600,
                     .ranks_per_node = 2});
      const Inputs inputs = upload_inputs(rank, one);
      const auto call = [&] {
        buffer.dispatch(inputs.dispatch, rank.call());
        buffer.check();
      };
      if (rank.rank() == 0) {
        require_throws<SystemError>(call, {"to rank 2 failed", "remote access"}, "whose NIC fails");
      } else if (rank.rank() == 2) {
        require_throws<TimeoutError>(call, {"for rank 0", "RDMA (handler "}, "who waits");
      } else {
        require_throws<TimeoutError>(call, {"for rank"}, "the others");
      }
      rank.executor()->synchronize(rank.stream());  // throws where a block has left loads under way
      rank.bootstrap()->barrier();                  // no heap goes away while another rank's NIC may still write to it
    });
  }
}

}  // namespace
}  // namespace deep_ep::test
