// Our figures beside those of a file. Only what has the same shape is compared.
#pragma once

#include <string>
#include <vector>

#include "tools/bench/output/results.hpp"

namespace deep_ep::tools {

struct ComparedFigure {
  std::string what;      ///< "intranode dispatch fp8"
  std::string quantity;  ///< a column of the file: "gb_per_s", "median_us", ...
  double ours = 0;
  double theirs = 0;
  double ratio = 0;  ///< above 1: ours is faster, whatever the quantity
  std::string how;   ///< how each was done: SMs, chunks, mode
  std::string note;  ///< of theirs, and what their file does not say of the shape
};

struct Comparison {
  ResultFile reference;
  std::vector<ComparedFigure> figures{};
  std::vector<std::string> refusals{};  ///< a sentence for everything of one kind and another shape
  std::vector<std::string> warnings{};  ///< what makes ratios mean less

  /// The least ratio; 0 where nothing could be compared.
  double worst_ratio() const;
  std::string text() const;
};

/// The best of ours against the best of theirs, for each operation and shape.
Comparison compare(const std::vector<Figure>& ours, const ResultFile& reference);

}  // namespace deep_ep::tools
