// Comma-separated values as spreadsheets write and read them: fields with commas, quotes or line ends are quoted.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace deep_ep::tools {

/// A line with its end.
std::string csv_line(const std::vector<std::string>& fields);

struct CsvRow {
  int line = 0;  ///< of the text, from 1 on
  std::vector<std::string> fields;
};

struct CsvText {
  std::vector<std::string> comments;  ///< lines in front of the first row that begin with '#', without that
  std::vector<CsvRow> rows;           ///< empty lines and further comments are left out
};

/// @throws InvalidArgument, with `name` and the line, for a quote without its other end.
CsvText parse_csv(std::string_view text, const std::string& name);

}  // namespace deep_ep::tools
