#include "tools/doctor/report.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace deep_ep::tools {

const char* name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::skip:
      return "skip";
    case Verdict::ok:
      return "ok";
    case Verdict::note:
      return "note";
    case Verdict::warning:
      return "warning";
    case Verdict::error:
      break;
  }
  return "error";
}

const char* word_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::skip:
      return "skip";
    case Verdict::ok:
    case Verdict::note:
      return "ok";
    case Verdict::warning:
      return "warn";
    case Verdict::error:
      break;
  }
  return "fail";
}

Verdict worst_of(const Findings& findings) {
  Verdict worst = Verdict::ok;
  for (const Finding& finding : findings) worst = std::max(worst, finding.verdict);
  return worst;
}

std::string to_text(const Findings& findings) {
  std::vector<const Finding*> order;
  for (const Finding& finding : findings) order.push_back(&finding);
  std::stable_sort(order.begin(), order.end(),
                   [](const Finding* a, const Finding* b) { return a->verdict < b->verdict; });
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

}  // namespace deep_ep::tools
