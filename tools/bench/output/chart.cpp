#include "tools/bench/output/chart.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <set>

#include "tools/bench/output/svg.hpp"

namespace deep_ep::tools {
namespace {

constexpr double kChartWidth = 860;
constexpr double kChartLeft = 74;
constexpr double kChartRight = 26;
constexpr double kChartTop = 48;
constexpr double kPlotHeight = 360;
constexpr double kAxisRoom = 58;    ///< below the plot: marks and label
constexpr double kLegendLine = 18;  ///< each line has one, below that
constexpr double kPlotWidth = kChartWidth - kChartLeft - kChartRight;
constexpr std::size_t kMostMarks = 14;  ///< of the x axis

/// Lines that share a colour differ by their dashes.
std::string style_of(std::size_t line) {
  constexpr std::array kDashes = {"", " stroke-dasharray=\"7 4\"", " stroke-dasharray=\"2 4\""};
  return fmt::format("stroke=\"{}\"{}", kColours[line % kColours.size()],
                     kDashes[line / kColours.size() % kDashes.size()]);
}

/// From values to places in the picture.
class ChartScale {
 public:
  explicit ChartScale(const Chart& chart) {
    std::set<double> all;
    double largest_y = 0;
    for (const ChartLine& line : chart.lines) {
      for (const auto& [x, y] : line.points) {
        all.insert(x);
        largest_y = std::max(largest_y, y);
      }
    }
    xs_.assign(all.begin(), all.end());
    if (xs_.empty()) xs_ = {0};
    constexpr double kWide = 16;
    logarithmic_ = xs_.front() > 0 && xs_.back() / xs_.front() > kWide;
    y_ticks_ = ticks_up_to(largest_y);
  }

  double x(double value) const {
    const double from = place(xs_.front());
    const double to = place(xs_.back());
    constexpr double kEdge = 0.04;  // room between axis and first point
    const double share = to > from ? (place(value) - from) / (to - from) : 0.5;
    return kChartLeft + kPlotWidth * (kEdge + (1 - 2 * kEdge) * share);
  }
  double y(double value) const { return kChartTop + kPlotHeight * (1 - value / y_ticks_.back()); }

  const std::vector<double>& y_ticks() const { return y_ticks_; }
  /// Where there were measurements; of many, some.
  std::vector<double> x_ticks() const {
    const std::size_t step = (xs_.size() + kMostMarks - 1) / kMostMarks;
    std::vector<double> ticks;
    double last = -1000;
    for (std::size_t i = 0; i < xs_.size(); i += step) {
      constexpr double kLeastGap = 34;  // that labels do not touch
      if (x(xs_[i]) - last < kLeastGap) continue;
      ticks.push_back(xs_[i]);
      last = x(xs_[i]);
    }
    return ticks;
  }

 private:
  double place(double value) const { return logarithmic_ ? std::log2(value) : value; }

  std::vector<double> xs_;
  std::vector<double> y_ticks_;
  bool logarithmic_ = false;
};

/// 1048576 as 1M: of powers of two, which sizes are.
std::string show_x(double value) {
  const auto whole = static_cast<std::int64_t>(std::clamp(value, -1e15, 1e15));
  if (static_cast<double>(whole) == value && whole >= 16384 && whole % 1024 == 0) {
    if (whole % (1 << 30) == 0) return fmt::format("{}G", whole >> 30);
    return whole % (1 << 20) == 0 ? fmt::format("{}M", whole >> 20) : fmt::format("{}k", whole >> 10);
  }
  return fmt::format("{:g}", value);
}

std::string axes_svg(const Chart& chart, const ChartScale& scale) {
  std::string svg;
  for (const double tick : scale.y_ticks()) {
    svg +=
        straight_line(kChartLeft, scale.y(tick), kChartLeft + kPlotWidth, scale.y(tick), tick == 0 ? "#333" : "#ddd");
    svg += text_at(kChartLeft - 8, scale.y(tick) + 4, "end", fmt::format("{:g}", tick), " class=\"y-tick\"");
  }
  const double bottom = kChartTop + kPlotHeight;
  svg += straight_line(kChartLeft, kChartTop, kChartLeft, bottom, "#333");
  for (const double tick : scale.x_ticks()) {
    svg += straight_line(scale.x(tick), bottom, scale.x(tick), bottom + 5, "#333");
    svg += text_at(scale.x(tick), bottom + 20, "middle", show_x(tick), " class=\"x-tick\"");
  }
  svg += text_at(kChartLeft + kPlotWidth / 2, bottom + 42, "middle", chart.x_label);
  const double middle = kChartTop + kPlotHeight / 2;
  svg +=
      text_at(18, middle, "middle", chart.y_label, fmt::format(" transform=\"rotate(-90 18 {:.1f})\"", middle).c_str());
  return svg + text_at(kChartWidth / 2, 26, "middle", chart.title, " font-size=\"15\" font-weight=\"bold\"");
}

std::string line_svg(const ChartLine& line, std::size_t number, const ChartScale& scale) {
  std::string places;
  for (const auto& [x, y] : line.points) places += fmt::format(" {:.1f},{:.1f}", scale.x(x), scale.y(y));
  std::string svg = "<g class=\"line\">\n";
  if (line.points.size() > 1) {
    svg += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke-width=\"2\" {}/>\n", places.substr(1),
                       style_of(number));
  }
  for (const auto& [x, y] : line.points) {
    svg += fmt::format(
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\" fill=\"{}\"><title>{}: {:g}, {:.6g}</title></circle>\n",
        scale.x(x), scale.y(y), kColours[number % kColours.size()], escaped(line.name), x, y);
  }
  return svg + "</g>\n";
}

std::string legend_svg(const Chart& chart) {
  std::string svg;
  double y = kChartTop + kPlotHeight + kAxisRoom + kLegendLine / 2;
  for (std::size_t i = 0; i < chart.lines.size(); ++i, y += kLegendLine) {
    svg += fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke-width=\"2\" {}/>\n",
                       kChartLeft, y - 4, kChartLeft + 30, y - 4, style_of(i));
    svg += text_at(kChartLeft + 38, y, "start", chart.lines[i].name, " class=\"legend\"");
  }
  return svg;
}

}  // namespace

std::string to_svg(const Chart& chart) {
  const double height =
      kChartTop + kPlotHeight + kAxisRoom + kLegendLine * (static_cast<double>(chart.lines.size()) + 1);
  const ChartScale scale(chart);
  std::string svg = axes_svg(chart, scale);
  for (std::size_t i = 0; i < chart.lines.size(); ++i) svg += line_svg(chart.lines[i], i, scale);
  return svg_of(kChartWidth, height, svg + legend_svg(chart));
}

}  // namespace deep_ep::tools
