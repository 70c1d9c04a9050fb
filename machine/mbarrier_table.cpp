#include "machine/mbarrier_table.hpp"

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::host_machine {

namespace {

constexpr std::uint64_t kTicketMark = 0x6d62617200000000u;  // "mbar" in the upper half
constexpr std::uint64_t kTicketMask = 0xffffffff00000000u;
constexpr std::uint32_t kMostArrivals = (1u << 20) - 1;

}  // namespace

bool MbarrierState::advance() {
  if (missing != 0 || expected_bytes != 0) return false;
  missing = arrivals;
  ++phase;
  return true;
}

std::uint64_t MbarrierTable::init(const std::uint64_t& word, std::uint32_t arrivals) {
  if (!shared_.contains(&word, sizeof word)) fail<Error>("mbarrier::init of a barrier outside shared memory");
  if (arrivals == 0 || arrivals > kMostArrivals) {
    fail<Error>("mbarrier::init at {} with {} arrivals; allowed: 1 to {}", shared_.name(&word), arrivals,
                kMostArrivals);
  }
  for (MbarrierState& state : states_) {
    if (state.word == &word) fail<Error>("mbarrier::init of a living barrier: {}", describe(state));
  }
  auto& state = states_.emplace_back();
  state.word = &word;
  state.arrivals = state.missing = arrivals;
  return kTicketMark | (states_.size() - 1);
}

void MbarrierTable::fence_init() {
  for (MbarrierState& state : states_) state.fenced = true;
}

MbarrierState& MbarrierTable::find(const std::uint64_t& word, std::uint64_t ticket) {
  const std::uint64_t index = ticket & ~kTicketMask;
  if ((ticket & kTicketMask) != kTicketMark || index >= states_.size() || states_[index].word != &word) {
    fail<Error>("no mbarrier lives at {}: not initialised yet, or overwritten (the word is {:#x})",
                shared_.contains(&word, sizeof word) ? shared_.name(&word) : "an address outside shared memory",
                ticket);
  }
  return states_[index];
}

std::string MbarrierTable::describe(const MbarrierState& state) const {
  return fmt::format("mbarrier at {}, phase {}: {} of {} arrivals and {} bytes missing", shared_.name(state.word),
                     state.phase, state.missing, state.arrivals, state.expected_bytes);
}

std::string MbarrierTable::unfinished() const {
  for (const MbarrierState& state : states_) {
    if (!state.loads.empty()) {
      return fmt::format("the block ends before a bulk load of {} bytes into {} was waited for ({})",
                         state.loads.front().bytes, shared_.name(state.loads.front().shared), describe(state));
    }
    if (state.expected_bytes != 0) {
      return fmt::format("the block ends with an mbarrier whose expected and loaded bytes differ ({})",
                         describe(state));
    }
  }
  return {};
}

}  // namespace deep_ep::host_machine
