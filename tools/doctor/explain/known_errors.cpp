// The tables of docs/troubleshooting.md and docs/foreign-errors.md, which the build puts into the program.
#include <string>

#include "csrc/support/text.hpp"
#include "tools/doctor/explain/explain.hpp"

namespace deep_ep::tools {
namespace {

// Made by the build: embed_table.cmake.
constexpr std::string_view kOwn[] = {
#include <troubleshooting_page.inc>
};
constexpr std::string_view kForeign[] = {
#include <foreign-errors_page.inc>
};

/// The texts between backquotes of a table's cell.
std::vector<std::string> quoted(std::string_view cell) {
  std::vector<std::string> texts;
  while (true) {
    const std::size_t begin = cell.find('`');
    if (begin == std::string_view::npos) return texts;
    const std::size_t end = cell.find('`', begin + 1);
    if (end == std::string_view::npos) return texts;
    texts.emplace_back(cell.substr(begin + 1, end - begin - 1));
    cell.remove_prefix(end + 1);
  }
}

/// "[RDMA](rdma.md#x)" becomes "RDMA (docs/rdma.md#x)"; a link within the page loses its address.
std::string without_links(std::string_view cell) {
  std::string text;
  while (true) {
    const std::size_t open = cell.find('[');
    const std::size_t middle = open == std::string_view::npos ? open : cell.find("](", open);
    const std::size_t close = middle == std::string_view::npos ? middle : cell.find(')', middle);
    if (close == std::string_view::npos) return text + std::string(cell);
    const std::string_view target = cell.substr(middle + 2, close - middle - 2);
    text += cell.substr(0, open);
    text += cell.substr(open + 1, middle - open - 1);
    if (!target.starts_with('#')) text += " (docs/" + std::string(target) + ")";
    cell.remove_prefix(close + 1);
  }
}

/// "as above" in a cell, alone or before more text, becomes what the cell of the row above says.
std::string without_reference(std::string cell, const std::string& above) {
  constexpr std::string_view kReference = "as above";
  return cell.starts_with(kReference) ? above + cell.substr(kReference.size()) : cell;
}

/// Cells are divided by " | ": messages have bars of their own.
std::vector<std::string_view> cells_of(std::string_view row) {
  row = trim(row);
  row.remove_prefix(1);
  if (row.ends_with('|')) row.remove_suffix(1);
  std::vector<std::string_view> cells;
  while (true) {
    const std::size_t bar = row.find(" | ");
    cells.push_back(trim(row.substr(0, bar)));
    if (bar == std::string_view::npos) return cells;
    row.remove_prefix(bar + 2);
  }
}

}  // namespace

std::vector<KnownError> read_error_page(std::span<const std::string_view> lines, const std::string& origin) {
  std::vector<KnownError> errors;
  KnownError above;
  std::string heading;
  bool in_table = false;
  for (const std::string_view line : lines) {
    if (line.starts_with("## ")) heading = line.substr(3);
    if (line.starts_with("| text |")) {
      in_table = true;
    } else if (!line.starts_with('|')) {
      in_table = false;
    } else if (in_table && !line.starts_with("| ---")) {
      const std::vector<std::string_view> cells = cells_of(line);
      if (cells.size() < 2) continue;
      KnownError error{origin.empty() ? heading : origin, quoted(cells[0]), without_links(cells[1]),
                       cells.size() > 2 ? without_links(cells[2]) : ""};
      error.cause = without_reference(std::move(error.cause), above.cause);
      error.remedy = without_reference(std::move(error.remedy), above.remedy);
      above = error;
      if (!origin.empty()) std::erase_if(error.patterns, [](const auto& one) { return weight_of(one) < kLeastWeight; });
      if (!error.patterns.empty()) errors.push_back(std::move(error));
    }
  }
  return errors;
}

const std::vector<KnownError>& known_errors() {
  static const std::vector<KnownError> kErrors = [] {
    std::vector<KnownError> all = read_error_page(kOwn, "deep_ep");
    for (KnownError& error : read_error_page(kForeign, "")) all.push_back(std::move(error));
    return all;
  }();
  return kErrors;
}

}  // namespace deep_ep::tools
