// Which rank is the slow one, from what all ranks have waited.
#include <algorithm>
#include <cstring>
#include <optional>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/bootstrap/buffer_exchanges.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/low_latency_stats.hpp"

namespace deep_ep {
namespace {

/// [R] of what travels between ranks.
struct SourceTimes {
  std::uint64_t calls[2];
  double total_us[2], longest_us[2];
};

std::size_t index_of(int rank) { return static_cast<std::size_t>(rank); }

void check_times(const LowLatencyStats& stats, std::size_t ranks) {
  for (const LowLatencyWaitTimes* times : {&stats.dispatch, &stats.combine}) {
    if (times->calls.size() == ranks && times->total_us.size() == ranks && times->longest_us.size() == ranks) continue;
    fail<InvalidArgument>("stats of rank {} have {} calls, {} totals and {} longest waits, allowed: {} of each",
                          stats.rank, times->calls.size(), times->total_us.size(), times->longest_us.size(), ranks);
  }
  if (stats.rank < 0 || index_of(stats.rank) >= ranks) {
    fail<InvalidArgument>("stats are of rank {}, allowed: 0 to {}", stats.rank, ranks - 1);
  }
}

/// What the others wait for `source`: the lower median; nothing where nobody else has told.
std::optional<double> typical_wait(std::span<const LowLatencyStats> stats, int source) {
  std::vector<double> waits;
  for (const LowLatencyStats& of : stats) {
    if (of.rank != source) waits.push_back(of.mean_us(source));
  }
  if (waits.empty()) return {};
  const auto middle = waits.begin() + static_cast<std::ptrdiff_t>((waits.size() - 1) / 2);
  std::nth_element(waits.begin(), middle, waits.end());
  return *middle;
}

}  // namespace

double LowLatencyWaitTimes::mean_us(int source) const {
  const std::uint64_t number = calls.at(index_of(source));
  return number == 0 ? 0 : total_us.at(index_of(source)) / static_cast<double>(number);
}

LowLatencyVerdict find_late_ranks(std::span<const LowLatencyStats> stats, double threshold_us) {
  if (stats.empty()) throw InvalidArgument("stats are empty, allowed: those of one rank or more");
  const std::size_t ranks = stats.front().dispatch.calls.size();
  for (const LowLatencyStats& of : stats) check_times(of, ranks);

  LowLatencyVerdict verdict;
  verdict.waited_us.assign(ranks, 0);
  std::vector<int> known;
  for (int source = 0; index_of(source) < ranks; ++source) {
    const std::optional<double> wait = typical_wait(stats, source);
    if (!wait) continue;
    verdict.waited_us[index_of(source)] = *wait;
    known.push_back(source);
  }
  if (known.empty()) {
    verdict.text = "nobody is late: there is one rank";
    return verdict;
  }
  const auto waited = [&](int rank) { return verdict.waited_us[index_of(rank)]; };
  std::stable_sort(known.begin(), known.end(), [&](int a, int b) { return waited(a) > waited(b); });
  // One rank with one peer knows of no other to compare it with.
  const double least = known.size() == 1 ? 0 : waited(known.back());
  const double most = waited(known.front()) - least;
  for (const int rank : known) {
    const double longer = waited(rank) - least;
    if (longer >= threshold_us && longer >= most / 2) verdict.late.push_back(rank);
  }
  const std::string who = stats.size() == 1 ? fmt::format("rank {} waits", stats.front().rank) : "the others wait";
  if (verdict.late.empty()) {
    verdict.text = fmt::format(
        "nobody is late: {} at most {:.1f} us longer for one rank (rank {}) than for another in a dispatch and a "
        "combine, and {:.1f} us would be late",
        who, most, known.front(), threshold_us);
    return verdict;
  }
  std::vector<int> sorted = verdict.late;
  std::sort(sorted.begin(), sorted.end());
  const bool one = sorted.size() == 1;
  verdict.text = fmt::format("{} {} late: {} {:.1f} us for {} in a dispatch and a combine", format_ranks(sorted),
                             one ? "is" : "are", who, waited(known.front()), one ? "it" : "the slowest of them");
  if (known.size() > verdict.late.size()) {
    const int next = known[verdict.late.size()];
    verdict.text += fmt::format(", and {:.1f} us for the next (rank {})", waited(next), next);
  }
  return verdict;
}

std::vector<LowLatencyStats> gather_low_latency_stats(Bootstrap& bootstrap, const LowLatencyStats& own) {
  BufferExchanges exchanges(bootstrap, Purpose::statistics);
  const auto ranks = index_of(bootstrap.size());
  std::vector<SourceTimes> mine(ranks);
  agree(exchanges, "gathering low-latency statistics", [&] {
    check_times(own, ranks);
    for (std::size_t source = 0; source < ranks; ++source) {
      std::size_t kind = 0;
      for (const LowLatencyWaitTimes* times : {&own.dispatch, &own.combine}) {
        mine[source].calls[kind] = times->calls[source];
        mine[source].total_us[kind] = times->total_us[source];
        mine[source].longest_us[kind++] = times->longest_us[source];
      }
    }
  });
  const std::vector<std::byte> bytes = exchanges.all_gather(std::as_bytes(std::span(mine)));
  std::vector<SourceTimes> theirs(ranks * ranks);
  std::memcpy(theirs.data(), bytes.data(), theirs.size() * sizeof(SourceTimes));
  std::vector<LowLatencyStats> all;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    LowLatencyStats& stats =
        all.emplace_back(LowLatencyStats{.rank = static_cast<int>(rank), .dispatch = {}, .combine = {}});
    for (std::size_t source = 0; source < ranks; ++source) {
      const SourceTimes& of = theirs[rank * ranks + source];
      std::size_t kind = 0;
      for (LowLatencyWaitTimes* times : {&stats.dispatch, &stats.combine}) {
        times->calls.push_back(of.calls[kind]);
        times->total_us.push_back(of.total_us[kind]);
        times->longest_us.push_back(of.longest_us[kind++]);
      }
    }
  }
  return all;
}

}  // namespace deep_ep
