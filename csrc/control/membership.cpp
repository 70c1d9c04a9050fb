// How the ranks of a buffer join the control plane.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/control/plane.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::control {

std::unique_ptr<Membership> Membership::join(const std::shared_ptr<Plane>& plane, Bootstrap& bootstrap,
                                             const Words& words, const JoinOptions& options) {
  ProcessInfo mine;
  agree(bootstrap, "joining the control plane", [&] { mine = plane->info(false, true); });
  std::vector<ProcessInfo> ranks = all_gather_values(bootstrap, mine);
  const auto off = std::ranges::find(ranks, 0u, &ProcessInfo::on);
  if (off != ranks.end()) {
    const auto where = off - ranks.begin();
    if (options.masks) {
      fail<InvalidArgument>(
          "low_latency.masking is true, but DEEP_EP_CONTROL is off on rank {}; allowed with masking: on. Control "
          "threads decide which ranks are masked",
          where);
    }
    if (bootstrap.rank() == 0)
      log::info("control: off on rank {}, so a lost rank ends waits at their deadlines", where);
    return nullptr;
  }
  const bool alone =
      std::ranges::all_of(ranks, [&](const ProcessInfo& one) { return one.process == ranks.front().process; });
  const bool by_tcp =
      std::ranges::any_of(ranks, [&](const ProcessInfo& one) { return !plane->reaches_by_unix(ranks.front(), one); });
  if (!alone) agree(bootstrap, "opening a port for control connections", [&] { mine = plane->info(by_tcp); });
  if (by_tcp) ranks = all_gather_values(bootstrap, mine);
  std::unique_ptr<Membership> membership;
  agree(bootstrap, "connecting the control plane", [&] {
    const int member = plane->join(ranks.front().buffer, bootstrap.rank(), ranks, words, options);
    membership.reset(new Membership(plane, std::move(ranks), bootstrap.rank(), member));
  });
  return membership;
}

Membership::Membership(std::shared_ptr<Plane> plane, std::vector<ProcessInfo> ranks, int rank, int member)
    : plane_(std::move(plane)), ranks_(std::move(ranks)), rank_(rank), member_(member) {}

Membership::~Membership() { plane_->leave(member_); }

bool Membership::is_gone(int rank) const {
  const std::vector<int> ranks = gone();
  if (std::ranges::find(ranks, rank) != ranks.end()) return true;
  const std::vector<LostRank> verdicts = lost();
  return std::ranges::any_of(verdicts,
                             [&](const LostRank& one) { return one.rank == rank && one.why == LostWhy::gone; });
}

std::string Membership::describe_gone(int also) const {
  std::vector<int> ranks = gone();
  if (also != kNobody && is_gone(also) && std::ranges::find(ranks, also) == ranks.end()) ranks.push_back(also);
  std::string text;
  for (const int rank : ranks) {
    text += (text.empty() ? "" : ", ") + describe_end(rank);
  }
  return text;
}

std::string Membership::describe_end(int rank) const {
  return fmt::format("the process of rank {} has ended ({})", rank, describe(ranks_[static_cast<std::size_t>(rank)]));
}

bool Membership::meet(double most_s) {
  plane_->arrive(member_);
  const auto begin = std::chrono::steady_clock::now();
  for (auto nap = std::chrono::milliseconds(1);; nap = std::min(2 * nap, std::chrono::milliseconds(20))) {
    const std::vector<int> awaited = plane_->awaited_at_end(member_);
    if (awaited.empty()) return true;
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    if (most_s != 0 && waited.count() > most_s) {
      log::warn("buffer: rank {} waited {} s for {} to destroy the buffer, too, and goes alone", rank_, most_s,
                format_ranks(awaited));
      return false;
    }
    std::this_thread::sleep_for(nap);
  }
}

}  // namespace deep_ep::control
