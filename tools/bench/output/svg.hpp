// Pieces of SVG that all pictures are made of.
#pragma once

#include <array>
#include <string>
#include <vector>

namespace deep_ep::tools {

/// Colours that people who see colours differently can tell apart.
inline constexpr std::array kColours = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                        "#56b4e9", "#e69f00", "#000000", "#8a6d00"};

/// Text as XML holds it.
std::string escaped(const std::string& text);

std::string text_at(double x, double y, const char* anchor, const std::string& content, const char* more = "");
std::string straight_line(double x1, double y1, double x2, double y2, const char* colour);
/// The whole file: a white picture with `content`.
std::string svg_of(double width, double height, const std::string& content);

/// Numbers at which an axis that has to show 0 to `largest` has its marks; the last is `largest` or more.
std::vector<double> ticks_up_to(double largest);

}  // namespace deep_ep::tools
