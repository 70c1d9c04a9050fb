#include "tools/bench/output/results.hpp"

#include <algorithm>
#include <fstream>
#include <iostream>
#include <sstream>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

namespace fs = std::filesystem;

/// "key: value"; a comment without a key goes on with the value before it.
void add_provenance(ResultFile& file, std::string_view comment) {
  const std::string_view key = trim(comment.substr(0, std::min(comment.find(": "), comment.size())));
  const bool is_key = key.size() < trim(comment).size() && !key.empty() && key.find(' ') == std::string::npos;
  if (is_key) {
    file.provenance.emplace_back(key, trim(comment.substr(comment.find(": ") + 1)));
  } else if (!file.provenance.empty()) {
    file.provenance.back().second += fmt::format(" {}", trim(comment));
  }
}

std::vector<const FigureColumn*> columns_of(const std::vector<std::string>& names) {
  std::vector<const FigureColumn*> columns;
  for (const std::string& name : names) {
    const auto& all = figure_columns();
    const auto found = std::ranges::find_if(all, [&](const FigureColumn& column) { return column.name == name; });
    if (found == all.end()) fail<InvalidArgument>("'{}' is no column of `deep_ep bench --csv`", name);
    if (std::ranges::count(columns, &*found) != 0) fail<InvalidArgument>("column '{}' is there twice", name);
    columns.push_back(&*found);
  }
  return columns;
}

Figure figure_of(const std::vector<const FigureColumn*>& columns, const std::vector<std::string>& fields) {
  if (fields.size() != columns.size()) {
    fail<InvalidArgument>("{} fields, but {} columns", fields.size(), columns.size());
  }
  Figure figure;
  for (std::size_t i = 0; i < columns.size(); ++i) {
    try {
      set_field(figure, *columns[i], fields[i]);
    } catch (const InvalidArgument& error) {
      fail<InvalidArgument>("column {}: {}", columns[i]->name, error.what());
    }
  }
  return figure;
}

/// The folders for results that come with the library, seen from the folder of the program.
std::vector<fs::path> result_folders(const fs::path& program) {
  std::vector<fs::path> folders;
  constexpr int kUp = 5;  // build/PRESET/bin is three below the source tree
  fs::path folder = program.parent_path();
  for (int i = 0; i < kUp && folder.has_relative_path(); ++i, folder = folder.parent_path()) {
    for (const char* below : {"share/deep_ep/results", "results"}) {
      std::error_code ignored;
      if (fs::is_directory(folder / below, ignored)) folders.push_back(folder / below);
    }
  }
  return folders;
}

}  // namespace

std::string ResultFile::provenance_of(const std::string& key) const {
  const auto found = std::ranges::find_if(provenance, [&](const auto& entry) { return entry.first == key; });
  return found == provenance.end() ? "" : found->second;
}

ResultFile parse_results(std::istream& text, const std::string& name) {
  ResultFile file{.name = name, .provenance = {}, .figures = {}};
  std::vector<const FigureColumn*> columns;
  std::string line;
  for (int number = 1; std::getline(text, line); ++number) {
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    try {
      if (line[0] == '#') {
        if (columns.empty()) add_provenance(file, std::string_view(line).substr(1));
      } else if (columns.empty()) {
        columns = columns_of(csv_fields(line));
      } else {
        file.figures.push_back(figure_of(columns, csv_fields(line)));
      }
    } catch (const InvalidArgument& error) {
      fail<InvalidArgument>("{} line {}: {}", name, number, error.what());
    }
  }
  if (columns.empty()) fail<InvalidArgument>("{}: there is no line of column names in it", name);
  return file;
}

ResultFile read_results(const std::string& file) {
  if (file == "-") return parse_results(std::cin, file);
  std::error_code ignored;
  std::ifstream in(file, std::ios::binary);
  if (!in || fs::is_directory(file, ignored)) fail<InvalidArgument>("results {}: cannot read it", file);
  return parse_results(in, file);
}

fs::path find_results(const std::string& name, const fs::path& program) {
  std::error_code ignored;
  if (name == "-" || fs::exists(name, ignored)) return name;
  std::vector<std::string> known;
  if (name.find('/') == std::string::npos) {
    for (const fs::path& folder : result_folders(program)) {
      for (const fs::path& file : {folder / name, folder / (name + ".csv")}) {
        if (fs::is_regular_file(file, ignored)) return file;
      }
      for (const auto& entry : fs::directory_iterator(folder, ignored)) {
        if (entry.path().extension() == ".csv") known.push_back(entry.path().stem().string());
      }
    }
  }
  std::ranges::sort(known);
  fail<InvalidArgument>("--compare {}: there is no such file{}{}", name,
                        known.empty() ? "" : "; with the library come ", fmt::join(known, ", "));
}

}  // namespace deep_ep::tools
