// Files of measurements: CSV with lines "# key: value" in front that say where the figures come from.
#pragma once

#include <filesystem>
#include <istream>
#include <string>
#include <utility>
#include <vector>

#include "tools/bench/output/figure.hpp"

namespace deep_ep::tools {

struct ResultFile {
  std::string name;                                             ///< as the user gave it
  std::vector<std::pair<std::string, std::string>> provenance;  ///< key and value, in the file's order
  std::vector<Figure> figures;

  /// Empty where the file does not say.
  std::string provenance_of(const std::string& key) const;
};

/// A file that errors call `name`. @throws InvalidArgument with the line for what is not such a file.
ResultFile parse_results(std::istream& text, const std::string& name);
/// Reads a file. "-": standard input. @throws InvalidArgument where there is none.
ResultFile read_results(const std::string& file);

/// The file that a --compare names: a path, or the name of one that comes with the library ("seed-b200"), which lie in
/// share/deep_ep/results of the installation or results/ of the source tree, seen from the program `program`.
/// @throws InvalidArgument with what there is.
std::filesystem::path find_results(const std::string& name, const std::filesystem::path& program);

}  // namespace deep_ep::tools
