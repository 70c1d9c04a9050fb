// Ways in which tokens choose experts, from the ordinary to the degenerate. Everything follows from the seed.
#pragma once

#include <cstdint>
#include <vector>

#include "oracle/normal.hpp"
#include "oracle/random.hpp"

namespace deep_ep::oracle {

enum class Routing : std::uint8_t {
  uniform,         ///< every expert equally likely, distinct within a token where possible
  skewed,          ///< a few experts get most of the tokens, as in real models
  one_hot_expert,  ///< every token's first choice is the same expert, the others are dropped
  all_dropped,     ///< every entry is -1
  some_dropped,    ///< uniform with about a third of the entries -1
  duplicates,      ///< the same expert several times in one token
  no_experts,      ///< uniform with some entries below -1 and some beyond the last expert, which select nothing either
  // Of groups of experts, which are those of a node each:
  group_limited,  ///< a token's experts are in half of the groups (rounded up), other ones for every token
  one_group,      ///< every token's experts are in the same group
};
/// Those that need no groups.
inline constexpr Routing kRoutings[] = {Routing::uniform,     Routing::skewed,       Routing::one_hot_expert,
                                        Routing::all_dropped, Routing::some_dropped, Routing::duplicates,
                                        Routing::no_experts};
inline constexpr Routing kRoutingsOfGroups[] = {Routing::group_limited, Routing::one_group};
const char* name_of(Routing routing);

/// How many tokens each rank has.
enum class TokenCounts : std::uint8_t {
  equal,       ///< the same on every rank
  different,   ///< anything from 0 to the maximum
  some_empty,  ///< every other rank has none, rank 0 included
  all_empty,
};
inline constexpr TokenCounts kTokenCounts[] = {TokenCounts::equal, TokenCounts::different, TokenCounts::some_empty,
                                               TokenCounts::all_empty};
const char* name_of(TokenCounts counts);

/// `experts` divides by `groups`.
Selection make_selection(Routing routing, std::int64_t tokens, int topk, int experts, std::uint64_t seed,
                         int groups = 1);
std::vector<std::int64_t> make_token_counts(TokenCounts counts, int ranks, std::int64_t tokens, std::uint64_t seed);

}  // namespace deep_ep::oracle
