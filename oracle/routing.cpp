#include "oracle/routing.hpp"

#include <algorithm>
#include <cmath>

namespace deep_ep::oracle {
namespace {

/// A choice that the token has not made yet, unless it has made them all.
std::int64_t distinct_expert(Random& random, int experts, const std::int64_t* chosen, int made) {
  std::int64_t expert = random.below(experts);
  for (int tries = 0; tries < experts && std::find(chosen, chosen + made, expert) != chosen + made; ++tries) {
    expert = (expert + 1) % experts;
  }
  return expert;
}

std::int64_t skewed_expert(Random& random, int experts) {
  const double u = random.unit();
  return std::min<std::int64_t>(static_cast<std::int64_t>(u * u * u * experts), experts - 1);
}

/// So many different groups.
std::vector<std::int64_t> choose_groups(Random& random, int groups, int count) {
  std::vector<std::int64_t> chosen(static_cast<std::size_t>(groups));
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    const auto other = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i) + 1));
    chosen[i] = chosen[other];
    chosen[other] = static_cast<std::int64_t>(i);
  }
  chosen.resize(static_cast<std::size_t>(count));
  return chosen;
}

}  // namespace

const char* name_of(Routing routing) {
  constexpr const char* kNames[] = {"uniform",    "skewed",     "one_hot_expert", "all_dropped", "some_dropped",
                                    "duplicates", "no_experts", "group_limited",  "one_group"};
  return kNames[static_cast<std::size_t>(routing)];
}

const char* name_of(TokenCounts counts) {
  constexpr const char* kNames[] = {"equal", "different", "some_empty", "all_empty"};
  return kNames[static_cast<std::size_t>(counts)];
}

Selection make_selection(Routing routing, std::int64_t tokens, int topk, int experts, std::uint64_t seed, int groups) {
  Random random(seed);
  Selection result{.tokens = tokens, .topk = topk, .idx = {}, .weights = {}};
  const auto entries = static_cast<std::size_t>(tokens * topk);
  result.idx.resize(entries);
  result.weights.resize(entries);
  const std::int64_t hot = experts / 2;
  const int experts_of_group = experts / groups;
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::int64_t* const row = result.idx.data() + t * topk;
    std::vector<std::int64_t> open;  // groups in which this token chooses
    if (routing == Routing::group_limited) open = choose_groups(random, groups, (groups + 1) / 2);
    if (routing == Routing::one_group) open = {groups / 2};
    for (int k = 0; k < topk; ++k) {
      result.weights[static_cast<std::size_t>(t * topk + k)] = static_cast<float>(random.unit()) + 0.001f;
      switch (routing) {
        case Routing::uniform:
          row[k] = distinct_expert(random, experts, row, k);
          break;
        case Routing::skewed:
          row[k] = skewed_expert(random, experts);
          break;
        case Routing::one_hot_expert:
          row[k] = k == 0 ? hot : -1;
          break;
        case Routing::all_dropped:
          row[k] = -1;
          break;
        case Routing::some_dropped:
          row[k] = distinct_expert(random, experts, row, k);
          if (random.chance(0.35)) row[k] = -1;
          break;
        case Routing::duplicates:
          row[k] = k % 2 == 1 ? row[k - 1] : random.below(experts);
          break;
        case Routing::no_experts:
          row[k] = distinct_expert(random, experts, row, k);
          if (random.chance(0.35)) row[k] = k % 2 == 0 ? -2 - random.below(1000) : experts + random.below(1000);
          break;
        case Routing::group_limited:
        case Routing::one_group:  // the experts of open groups, counted through
          row[k] = distinct_expert(random, static_cast<int>(open.size()) * experts_of_group, row, k);
          break;
      }
    }
    if (open.empty()) continue;
    for (int k = 0; k < topk; ++k) {
      row[k] = open[static_cast<std::size_t>(row[k] / experts_of_group)] * experts_of_group + row[k] % experts_of_group;
    }
  }
  return result;
}

std::vector<std::int64_t> make_token_counts(TokenCounts counts, int ranks, std::int64_t tokens, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::int64_t> result;
  for (int r = 0; r < ranks; ++r) {
    switch (counts) {
      case TokenCounts::equal:
        result.push_back(tokens);
        break;
      case TokenCounts::different:
        result.push_back(random.below(tokens + 1));
        break;
      case TokenCounts::some_empty:
        result.push_back(r % 2 == 0 ? 0 : tokens);
        break;
      case TokenCounts::all_empty:
        result.push_back(0);
        break;
    }
  }
  return result;
}

}  // namespace deep_ep::oracle
