#include "tools/bench/output/svg.hpp"

#include <fmt/format.h>

#include <cmath>

namespace deep_ep::tools {

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += static_cast<unsigned char>(c) < ' ' ? ' ' : c;  // XML has no other control characters
    }
  }
  return result;
}

std::string text_at(double x, double y, const char* anchor, const std::string& content, const char* more) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>\n", x, y, anchor, more,
                     escaped(content));
}

std::string straight_line(double x1, double y1, double x2, double y2, const char* colour) {
  return fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\"/>\n", x1, y1, x2, y2,
                     colour);
}

std::vector<double> ticks_up_to(double largest) {
  constexpr double kAbout = 6;  // marks
  const double rough = (largest > 0 ? largest : 1) / kAbout;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double factor : {5.0, 2.0, 1.0}) {
    if (factor * power >= rough) step = factor * power;
  }
  std::vector<double> ticks{0};
  if (!(step > 0)) return {0, 1};  // too small for any step
  while (ticks.back() < largest || ticks.size() < 2) ticks.push_back(static_cast<double>(ticks.size()) * step);
  return ticks;
}

std::string svg_of(double width, double height, const std::string& content) {
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:g}\" height=\"{1:g}\" viewBox=\"0 0 {0:g} {1:g}\" "
             "font-family=\"sans-serif\" font-size=\"13\" fill=\"#222\">\n<rect width=\"{0:g}\" height=\"{1:g}\" "
             "fill=\"#fff\"/>\n",
             width, height) +
         content + "</svg>\n";
}

}  // namespace deep_ep::tools
