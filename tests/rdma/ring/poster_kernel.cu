#include "tests/rdma/ring/poster_kernel.hpp"

#include "kernels/rdma/poster.hpp"

namespace deep_ep::device {
namespace {

struct NeverGivesUp {
  DEEP_EP_DEVICE bool gives_up(int) const { return false; }
  DEEP_EP_DEVICE void blame_queue(const RdmaQueuePair&) const {}
};

DEEP_EP_DEVICE void poster_cost_body(const test::PosterCostParams& p, std::byte*) {
  rdma::Poster<WholeWarp, NeverGivesUp> poster(p.peer, p.wait, {});
  rdma::ToldWord word = poster.word({0}, *p.told);
  int ready = 1;
  std::uint64_t entries = 0;
  const auto progress = [&](int place) {
    ++entries;
    return poster.tell(word, static_cast<std::uint64_t>(place));
  };
  poster.post_rows(
      true, lane_index() + 1, [&] { return lane_index() < ready ? rdma::StagedRow::staged : rdma::StagedRow::awaited; },
      [&](bool posts) {
        if (p.completes && entries != 0 && lane_index() == 0) {
          store_release<Scope::system>(&p.completion->tail, rdma::tail_word(entries - 1, rdma::kCompletionOk));
        }
        warp::sync();
        ++ready;
        ++entries;
        return poster.put(Place<std::byte>{64}, Place<std::byte>{64}, 64, posts);
      },
      progress);
  poster.tell_rest(progress);
  poster.close();
}

}  // namespace
}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(poster_cost, deep_ep::device::poster_cost_body)
