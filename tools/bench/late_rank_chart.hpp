// The timeline of a dispatch and a combine as a picture.
#pragma once

#include <string>
#include <vector>

#include "tools/bench/late_rank.hpp"

namespace deep_ep::tools {

/// Something that a rank does from one moment to another. Microseconds.
struct TimelineBar {
  const char* name;
  double begin_us, end_us;
};

/// When what came from a rank was there.
struct TimelineMark {
  int source;
  double at_us;
};

struct TimelineLane {
  std::string name;
  std::vector<TimelineBar> bars;
  std::vector<TimelineMark> marks;
};

struct Timeline {
  std::string title;
  std::vector<TimelineLane> lanes;
};

/// A lane for each rank: the send and receive parts of both calls, and, from the begin of a receive part on, how long
/// the rank has waited for each other one.
Timeline timeline_of(const LateRankReport& report);

std::string to_svg(const Timeline& timeline);

}  // namespace deep_ep::tools
