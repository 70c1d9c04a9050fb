#include "tools/bench/output/results.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>

#include "deep_ep/error.hpp"
#include "tools/bench/output/csv.hpp"

namespace deep_ep::tools {
namespace {

namespace fs = std::filesystem;

std::string without_blanks(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

/// "# key: value"; a comment without a colon goes on with the value before it.
void add_provenance(ResultFile& file, const std::string& comment) {
  const std::size_t colon = comment.find(": ");
  const std::string key = colon == std::string::npos ? "" : without_blanks(comment.substr(0, colon));
  const bool is_key = !key.empty() && key.find(' ') == std::string::npos;
  if (is_key) {
    file.provenance.emplace_back(key, without_blanks(comment.substr(colon + 1)));
  } else if (!file.provenance.empty()) {
    file.provenance.back().second += ' ' + without_blanks(comment);
  }
}

std::vector<const FigureColumn*> columns_of(const CsvRow& header, const std::string& name) {
  std::vector<const FigureColumn*> columns;
  for (const std::string& field : header.fields) {
    const FigureColumn* column = find_column(field);
    if (column == nullptr) {
      throw InvalidArgument(
          fmt::format("{} line {}: '{}' is no column of `deep_ep bench --csv`", name, header.line, field));
    }
    if (std::ranges::count(columns, column) != 0) {
      throw InvalidArgument(fmt::format("{} line {}: column '{}' is there twice", name, header.line, field));
    }
    columns.push_back(column);
  }
  return columns;
}

/// Where results that come with the library may lie, seen from the folder of the program.
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

/// A whole file or standard input.
std::string read_text(const std::string& file) {
  if (file == "-") return {std::istreambuf_iterator<char>(std::cin), {}};
  std::error_code ignored;
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  if (in && !fs::is_directory(file, ignored)) text << in.rdbuf();
  if (!in || fs::is_directory(file, ignored)) throw InvalidArgument(fmt::format("results {}: cannot read it", file));
  return text.str();
}

}  // namespace

std::string ResultFile::provenance_of(const std::string& key) const {
  const auto found = std::ranges::find_if(provenance, [&](const auto& entry) { return entry.first == key; });
  return found == provenance.end() ? "" : found->second;
}

ResultFile parse_results(const std::string& text, const std::string& name) {
  const CsvText csv = parse_csv(text, name);
  ResultFile file{.name = name, .provenance = {}, .figures = {}};
  for (const std::string& comment : csv.comments) add_provenance(file, comment);
  if (csv.rows.empty()) throw InvalidArgument(fmt::format("{}: there is no line of column names in it", name));
  const std::vector<const FigureColumn*> columns = columns_of(csv.rows.front(), name);
  for (std::size_t i = 1; i < csv.rows.size(); ++i) {
    const CsvRow& row = csv.rows[i];
    if (row.fields.size() != columns.size()) {
      throw InvalidArgument(
          fmt::format("{} line {}: {} fields, but {} columns", name, row.line, row.fields.size(), columns.size()));
    }
    Figure figure;
    for (std::size_t c = 0; c < columns.size(); ++c) {
      try {
        set_field(figure, *columns[c], row.fields[c]);
      } catch (const InvalidArgument& error) {
        throw InvalidArgument(fmt::format("{} line {}, column {}: {}", name, row.line, columns[c]->name, error.what()));
      }
    }
    file.figures.push_back(figure);
  }
  return file;
}

ResultFile read_results(const std::string& file) { return parse_results(read_text(file), file); }

fs::path find_results(const std::string& name) {
  std::error_code ignored;
  return find_results(name, fs::read_symlink("/proc/self/exe", ignored));
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
  throw InvalidArgument(fmt::format("--compare {}: there is no such file{}{}", name,
                                    known.empty() ? "" : "; with the library come ", fmt::join(known, ", ")));
}

}  // namespace deep_ep::tools
