#include "tools/bench/late_rank_chart.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "tools/bench/output/svg.hpp"

namespace deep_ep::tools {
namespace {

constexpr double kTimelineWidth = 860;
constexpr double kTimelineLeft = 74;
constexpr double kTimelineRight = 26;
constexpr double kTimelineTop = 48;
constexpr double kLaneHeight = 40;
constexpr double kBarHeight = 22;
constexpr double kLegendRow = 20;
constexpr double kTimeWidth = kTimelineWidth - kTimelineLeft - kTimelineRight;

struct BarKind {
  const char* name;
  const char* colour;
};
constexpr std::array<BarKind, 4> kBarKinds = {{{"dispatch: send part", "#9ecae1"},
                                               {"dispatch: receive part", "#deebf7"},
                                               {"combine: send part", "#fdae6b"},
                                               {"combine: receive part", "#fee6ce"}}};

const char* colour_of_bar(const std::string& name) {
  const auto* kind = std::ranges::find_if(kBarKinds, [&](const BarKind& of) { return name == of.name; });
  return kind == kBarKinds.end() ? "#cccccc" : kind->colour;
}
const char* colour_of_source(int source) { return kColours[static_cast<std::size_t>(source) % kColours.size()]; }

std::string lane_svg(const TimelineLane& lane, double top, double us_width) {
  const auto x = [&](double us) { return kTimelineLeft + us * us_width; };
  std::string svg = text_at(kTimelineLeft - 8, top + kBarHeight / 2 + 4, "end", lane.name);
  for (const TimelineBar& bar : lane.bars) {
    svg += fmt::format(
        "<rect class=\"bar\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:g}\" fill=\"{}\" "
        "stroke=\"#555\" stroke-width=\"0.5\"><title>{}: {:.1f} to {:.1f} us</title></rect>\n",
        x(bar.begin_us), top, std::max(0.0, (bar.end_us - bar.begin_us) * us_width), kBarHeight,
        colour_of_bar(bar.name), escaped(bar.name), bar.begin_us, bar.end_us);
  }
  for (const TimelineMark& mark : lane.marks) {
    svg += fmt::format(
        "<line class=\"mark\" x1=\"{0:.1f}\" y1=\"{1:.1f}\" x2=\"{0:.1f}\" y2=\"{2:.1f}\" stroke=\"{3}\" "
        "stroke-width=\"2\"><title>from rank {4}: {5:.1f} us</title></line>\n",
        x(mark.at_us), top - 4, top + kBarHeight + 4, colour_of_source(mark.source), mark.source, mark.at_us);
  }
  return svg;
}

std::string legend_of(const Timeline& timeline, double top) {
  std::string svg;
  double x = kTimelineLeft;
  for (const BarKind& kind : kBarKinds) {
    svg += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"14\" height=\"12\" fill=\"{}\" stroke=\"#555\"/>\n", x,
                       top - 10, kind.colour);
    svg += text_at(x + 20, top, "start", kind.name);
    x += 185;
  }
  std::vector<int> sources;
  for (const TimelineLane& lane : timeline.lanes) {
    for (const TimelineMark& mark : lane.marks) sources.push_back(mark.source);
  }
  std::ranges::sort(sources);
  sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
  x = kTimelineLeft;
  for (const int source : sources) {
    svg += straight_line(x, top + kLegendRow - 12, x, top + kLegendRow + 2, colour_of_source(source));
    svg += text_at(x + 6, top + kLegendRow, "start", fmt::format("from rank {}", source));
    x += 105;
    if (x <= kTimelineWidth - 100) continue;
    x = kTimelineLeft;
    top += kLegendRow;
  }
  return svg;
}

}  // namespace

Timeline timeline_of(const LateRankReport& report) {
  Timeline timeline;
  timeline.title = fmt::format("A dispatch and a combine of {} tokens", report.tokens);
  for (std::size_t rank = 0; rank < report.stats.size(); ++rank) {
    const RankTimeline& when = report.timelines[rank];
    const std::array<double, 5> us = {0, when.dispatch_sent * 1e6, when.dispatched * 1e6, when.combine_sent * 1e6,
                                      when.combined * 1e6};
    TimelineLane lane{.name = fmt::format("rank {}", rank), .bars = {}, .marks = {}};
    for (std::size_t part = 0; part < kBarKinds.size(); ++part) {
      lane.bars.push_back({kBarKinds[part].name, us[part], us[part + 1]});
    }
    for (std::size_t source = 0; source < report.stats.size(); ++source) {
      if (source == rank) continue;
      const int from = static_cast<int>(source);
      lane.marks.push_back({from, us[1] + report.stats[rank].dispatch.mean_us(from)});
      if (report.stats[rank].combine.calls[source] == 0) continue;
      lane.marks.push_back({from, us[3] + report.stats[rank].combine.mean_us(from)});
    }
    timeline.lanes.push_back(std::move(lane));
  }
  return timeline;
}

std::string to_svg(const Timeline& timeline) {
  double last = 0;
  for (const TimelineLane& lane : timeline.lanes) {
    for (const TimelineBar& bar : lane.bars) last = std::max(last, bar.end_us);
    for (const TimelineMark& mark : lane.marks) last = std::max(last, mark.at_us);
  }
  const std::vector<double> ticks = ticks_up_to(last);
  const double us_width = kTimeWidth / ticks.back();
  const double bottom = kTimelineTop + kLaneHeight * static_cast<double>(timeline.lanes.size());
  std::string svg = text_at(kTimelineWidth / 2, 26, "middle", timeline.title, " font-size=\"15\" font-weight=\"bold\"");
  for (const double tick : ticks) {
    const double x = kTimelineLeft + tick * us_width;
    svg += straight_line(x, kTimelineTop - 6, x, bottom, tick == 0 ? "#333" : "#ddd");
    svg += text_at(x, bottom + 18, "middle", fmt::format("{:g}", tick));
  }
  svg += text_at(kTimelineLeft + kTimeWidth / 2, bottom + 38, "middle", "microseconds after a barrier of the ranks");
  double top = kTimelineTop + (kLaneHeight - kBarHeight) / 2;
  for (const TimelineLane& lane : timeline.lanes) {
    svg += lane_svg(lane, top, us_width);
    top += kLaneHeight;
  }
  const double legend = bottom + 62;
  const double rows = 2 + static_cast<double>(timeline.lanes.size()) / 7;
  return svg_of(kTimelineWidth, legend + kLegendRow * rows, svg + legend_of(timeline, legend));
}

}  // namespace deep_ep::tools
