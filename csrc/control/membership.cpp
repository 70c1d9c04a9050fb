// How the ranks of a buffer join the control plane.
#include <algorithm>
#include <set>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/control/plane.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep::control {

std::unique_ptr<Membership> Membership::join(const std::shared_ptr<Plane>& plane, Bootstrap& bootstrap,
                                             const Words& words) {
  Card mine;
  agree(bootstrap, "joining the control plane", [&] { mine = plane->card(false, true); });
  std::vector<Card> ranks = all_gather_values(bootstrap, mine);
  std::set<std::array<std::uint64_t, 2>> processes;
  for (const Card& card : ranks) processes.insert(card.process.words);
  const auto off = std::ranges::find(ranks, 0u, &Card::on);
  const bool says_so = bootstrap.rank() == 0;
  if (off != ranks.end()) {
    if (says_so)
      log::info("control: off on rank {}, so a lost rank ends waits at their deadlines", off - ranks.begin());
    return nullptr;
  }
  if (processes.size() == 1) return nullptr;
  if (processes.size() > Plane::kMostProcesses) {
    if (says_so) {
      log::warn("control: {} processes, and no more than {} are connected: a lost rank ends waits at their deadlines",
                processes.size(), Plane::kMostProcesses);
    }
    return nullptr;
  }
  const bool by_tcp =
      std::ranges::any_of(ranks, [&](const Card& one) { return !plane->reaches_by_unix(ranks.front(), one); });
  agree(bootstrap, "opening a port for control connections", [&] { mine = plane->card(by_tcp); });
  if (by_tcp) ranks = all_gather_values(bootstrap, mine);
  std::unique_ptr<Membership> membership;
  agree(bootstrap, "connecting the control plane", [&] {
    const int seat = plane->sit_down(ranks.front().buffer, bootstrap.rank(), ranks, words);
    membership.reset(new Membership(plane, std::move(ranks), seat));
  });
  return membership;
}

Membership::Membership(std::shared_ptr<Plane> plane, std::vector<Card> ranks, int seat)
    : plane_(std::move(plane)), ranks_(std::move(ranks)), seat_(seat) {}

Membership::~Membership() { plane_->leave(seat_); }

int Membership::lost_for(int rank) const {
  const std::vector<int> lost = plane_->lost(seat_);
  return rank >= 0 && rank < static_cast<int>(lost.size()) ? lost[static_cast<std::size_t>(rank)] : kNobody;
}

std::string Membership::describe_gone(int also) const {
  std::vector<int> ranks = gone();
  if (also != kNobody && std::ranges::find(ranks, also) == ranks.end()) ranks.push_back(also);
  std::string text;
  for (const int rank : ranks) {
    text += fmt::format("{}the process of rank {} has ended ({})", text.empty() ? "" : ", ", rank,
                        describe(ranks_[static_cast<std::size_t>(rank)]));
  }
  return text;
}

}  // namespace deep_ep::control
