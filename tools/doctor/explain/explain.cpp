#include "tools/doctor/explain/explain.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <span>

#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "tools/common/json_output.hpp"

namespace deep_ep::tools {
namespace {

/// Bytes of a pasted log: enough for the errors of a run.
constexpr std::size_t kMostText = std::size_t{1} << 20;
/// Pieces of one message are not farther apart.
constexpr std::size_t kMostBetween = 400;

std::vector<std::string> pieces_of(std::string_view pattern) {
  std::vector<std::string> pieces;
  for (const std::string_view piece : split(pattern, "...")) {
    if (!piece.empty()) pieces.push_back(normal(piece));
  }
  return pieces;
}

std::string read_standard_input() {
  std::string text;
  std::array<char, 4096> block{};
  while (const std::size_t count = std::fread(block.data(), 1, block.size(), stdin)) {
    text.append(block.data(), count);
    // Of a long log the beginning and, above all, the end.
    if (text.size() > 2 * kMostText) text.erase(kMostText / 2, text.size() - kMostText);
  }
  if (text.size() > kMostText) text.erase(kMostText / 2, text.size() - kMostText);
  return text;
}

// --- the pages ---

// Made by the build: embed_table.cmake.
constexpr std::string_view kOwn[] = {
#include <errors_page.inc>
};
constexpr std::string_view kForeign[] = {
#include <foreign-errors_page.inc>
};

/// The texts between backquotes of a table's cell.
std::vector<std::string> quoted(std::string_view cell) {
  std::vector<std::string> texts;
  const std::vector<std::string_view> parts = split(cell, '`');
  for (std::size_t i = 1; i + 1 < parts.size(); i += 2) texts.emplace_back(parts[i]);
  return texts;
}

/// Cells are divided by " | ": messages have bars of their own.
std::vector<std::string_view> cells_of(std::string_view row) {
  row = trim(row).substr(1);
  if (row.ends_with('|')) row.remove_suffix(1);
  return split(row, " | ");
}

}  // namespace

std::size_t weight_of(std::string_view pattern) {
  return static_cast<std::size_t>(
      std::ranges::count_if(pattern, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; }));
}

std::string normal(std::string_view text) {
  std::string result;
  for (const char c : text.substr(0, kMostText)) {
    if (kWhiteSpace.find(c) != std::string_view::npos) {
      if (!result.empty() && result.back() != ' ') result += ' ';
    } else if (c == '`' || c == '"') {
      result += '\'';
    } else {
      result += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
  }
  return result;
}

bool is_like(const std::string& normal_text, std::string_view pattern) {
  const std::vector<std::string> pieces = pieces_of(pattern);
  if (pieces.empty()) return false;
  for (std::size_t first = normal_text.find(pieces[0]); first != std::string::npos;
       first = normal_text.find(pieces[0], first + 1)) {
    std::size_t end = first + pieces[0].size();
    const bool rest = std::all_of(pieces.begin() + 1, pieces.end(), [&](const std::string& piece) {
      const std::size_t at =
          std::string_view(normal_text).substr(0, end + kMostBetween + piece.size()).find(piece, end);
      if (at == std::string_view::npos) return false;
      end = at + piece.size();
      return true;
    });
    if (rest) return true;
  }
  return false;
}

std::vector<KnownError> read_error_page(std::span<const std::string_view> lines, const std::string& origin) {
  std::vector<KnownError> errors;
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
      KnownError error{origin.empty() ? heading : origin, quoted(cells[0]), std::string(cells[1]),
                       std::string(cells.size() > 2 ? cells[2] : "")};
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

std::vector<Explanation> explain(std::string_view text) {
  const std::string error = normal(text);
  std::vector<Explanation> candidates;
  for (const KnownError& known : known_errors()) {
    const std::string* best = nullptr;
    for (const std::string& pattern : known.patterns) {
      if (is_like(error, pattern) && (best == nullptr || weight_of(pattern) > weight_of(*best))) best = &pattern;
    }
    if (best != nullptr) candidates.push_back({known.origin, *best, known.cause, known.remedy});
  }
  std::ranges::stable_sort(candidates, std::ranges::greater(),
                           [](const Explanation& one) { return weight_of(one.pattern); });
  std::vector<Explanation> explanations;
  for (const Explanation& candidate : candidates) {
    const bool told = std::ranges::any_of(
        explanations, [&](const Explanation& better) { return is_like(normal(better.pattern), candidate.pattern); });
    if (!told) explanations.push_back(candidate);  // otherwise the same message, recognised by less of it
  }
  return explanations;
}

std::string to_text(const std::vector<Explanation>& explanations) {
  if (explanations.empty()) {
    return "Nothing is known about this text.\n"
           "  to do:  look at the first error of all ranks (DEEP_EP_LOG=info), run `deep_ep doctor`; if that does not\n"
           "          help, open an issue with the text and the file of `deep_ep doctor --bundle report.txt`\n";
  }
  constexpr std::size_t kShown = 3;
  std::string text;
  for (const Explanation& explanation : std::span(explanations).first(std::min(kShown, explanations.size()))) {
    text += fmt::format("{}{} says: {}\n  cause:  {}\n", text.empty() ? "" : "\n", explanation.origin,
                        explanation.pattern, explanation.cause);
    if (!explanation.remedy.empty()) text += fmt::format("  to do:  {}\n", explanation.remedy);
  }
  if (explanations.size() > kShown) {
    text += fmt::format("\n{} more messages are known in this text, which say less: `--json` has all\n",
                        explanations.size() - kShown);
  }
  return text;
}

nlohmann::json to_json(std::string_view text, const std::vector<Explanation>& explanations) {
  return {{"text", text}, {"known", !explanations.empty()}, {"explanations", explanations}};
}

int run_explain(const std::string& argument, bool json) {
  const std::string text = argument == "-" ? read_standard_input() : argument;
  if (trim(text).empty())
    throw InvalidArgument("--explain: the text is empty, allowed: an error message, or - to read it");
  const std::vector<Explanation> explanations = explain(text);
  if (json) {
    print_json(to_json(text, explanations));
  } else {
    fmt::print("{}", to_text(explanations));
  }
  return explanations.empty() ? 1 : 0;
}

}  // namespace deep_ep::tools
