#include "tools/doctor/report.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace deep_ep::tools {

const char* name_of(Verdict verdict) {
  constexpr const char* kNames[] = {"skip", "ok", "note", "warning", "error"};
  return kNames[static_cast<std::size_t>(verdict)];
}

Verdict worst_of(const Findings& findings) {
  Verdict worst = Verdict::ok;
  for (const Finding& finding : findings) worst = std::max(worst, finding.verdict);
  return worst;
}

std::string to_text(const Findings& findings) {
  std::vector<const Finding*> order;
  for (const Finding& finding : findings) order.push_back(&finding);
  std::ranges::stable_sort(order, [](const Finding* a, const Finding* b) { return a->verdict < b->verdict; });
  std::string text;
  std::size_t errors = 0;
  std::size_t warnings = 0;
  for (const Finding* finding : order) {
    errors += finding->verdict == Verdict::error ? 1 : 0;
    warnings += finding->verdict == Verdict::warning ? 1 : 0;
    if (finding->verdict == Verdict::skip) continue;  // the list of checks has them
    text += fmt::format("[{}] {}{}{}: {}\n", name_of(finding->verdict), finding->id, finding->id.empty() ? "" : " ",
                        finding->check, finding->found);
    if (!finding->meaning.empty()) text += fmt::format("    meaning: {}\n", finding->meaning);
    if (!finding->action.empty()) text += fmt::format("    to do:   {}\n", finding->action);
  }
  return text +
         fmt::format("{} error{}, {} warning{}\n", errors, errors == 1 ? "" : "s", warnings, warnings == 1 ? "" : "s");
}

std::string printable(std::string text) {
  for (char& c : text) {
    const auto code = static_cast<unsigned char>(c);
    if ((code < 0x20 && c != '\n' && c != '\t') || code == 0x7f) c = '?';
  }
  return text;
}

}  // namespace deep_ep::tools
