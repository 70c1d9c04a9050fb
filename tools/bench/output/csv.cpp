#include "tools/bench/output/csv.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

std::string quoted_if_needed(const std::string& field) {
  if (field.find_first_of(",\"\r\n") == std::string::npos && !field.starts_with('#')) return field;
  std::string quoted = "\"";
  for (const char c : field) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + '"';
}

/// Goes through a text row by row.
class CsvParser {
 public:
  CsvParser(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  CsvText parse() {
    CsvText result;
    while (at_ < text_.size()) {
      if (text_[at_] == '#') {
        const std::string comment = rest_of_line();
        if (result.rows.empty()) result.comments.push_back(comment.substr(1));
      } else if (text_[at_] == '\n' || text_[at_] == '\r') {
        rest_of_line();
      } else {
        result.rows.push_back(row());
      }
    }
    return result;
  }

 private:
  std::string rest_of_line() {
    const std::size_t end = std::min(text_.find('\n', at_), text_.size());
    std::string line(text_.substr(at_, end - at_));
    if (line.ends_with('\r')) line.pop_back();
    at_ = std::min(end + 1, text_.size());
    ++line_;
    return line;
  }

  CsvRow row() {
    CsvRow row{.line = line_, .fields = {}};
    for (;;) {
      row.fields.push_back(text_.substr(at_).starts_with('"') ? quoted_field() : plain_field());
      const bool more = at_ < text_.size() && text_[at_] == ',';
      if (!more) break;
      ++at_;
    }
    rest_of_line();
    return row;
  }

  std::string plain_field() {
    const std::size_t end = std::min(text_.find_first_of(",\n", at_), text_.size());
    std::string field(text_.substr(at_, end - at_));
    if (field.ends_with('\r')) field.pop_back();
    at_ = end;
    return field;
  }

  std::string quoted_field() {
    const int begin = line_;
    std::string field;
    for (++at_; at_ < text_.size(); ++at_) {
      const bool quote = text_[at_] == '"';
      if (quote && !text_.substr(at_ + 1).starts_with('"')) {
        ++at_;
        return field;
      }
      if (quote) ++at_;
      if (text_[at_] == '\n') ++line_;
      field += text_[at_];
    }
    throw InvalidArgument(
        fmt::format("{} line {}: a field begins with a quote and does not end with one", name_, begin));
  }

  std::string_view text_;
  const std::string& name_;
  std::size_t at_ = 0;
  int line_ = 1;
};

}  // namespace

std::string csv_line(const std::vector<std::string>& fields) {
  std::string line;
  for (const std::string& field : fields) line += quoted_if_needed(field) + ',';
  if (!line.empty()) line.pop_back();
  return line + '\n';
}

CsvText parse_csv(std::string_view text, const std::string& name) { return CsvParser(text, name).parse(); }

}  // namespace deep_ep::tools
