#include "tools/bench/output/compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace deep_ep::tools {
namespace {

struct ShapeColumn {
  const char* name;
  Figure::Count Figure::*member;
};
constexpr ShapeColumn kShape[] = {{"ranks", &Figure::ranks},   {"nodes", &Figure::nodes}, {"tokens", &Figure::tokens},
                                  {"hidden", &Figure::hidden}, {"topk", &Figure::topk},   {"experts", &Figure::experts},
                                  {"groups", &Figure::groups}, {"bytes", &Figure::bytes}};

struct Quantity {
  const char* name;
  Figure::Number Figure::*member;
  bool more_is_better;
};
constexpr Quantity kQuantities[] = {{"gb_per_s", &Figure::gb_per_s, true},
                                    {"rdma_gb_per_s", &Figure::rdma_gb_per_s, true},
                                    {"median_us", &Figure::median_us, false},
                                    {"mean_us", &Figure::mean_us, false}};

/// Experts on all nodes, whether a file says so by 0 or by the number of nodes.
Figure with_plain_groups(Figure figure) {
  if (figure.nodes && (figure.groups == 0 || *figure.nodes == 1)) figure.groups = figure.nodes;
  return figure;
}

std::string kind_of(const Figure& figure) {
  std::string kind = figure.benchmark;
  for (const std::string* word : {&figure.operation, &figure.dtype, &figure.mode, &figure.part, &figure.nic}) {
    if (!word->empty() && *word != "-") kind += ' ' + *word;
  }
  return kind;
}

bool same_kind(const Figure& ours, const Figure& theirs) {
  const auto fits = [](const std::string& mine, const std::string& wanted) { return wanted.empty() || mine == wanted; };
  // Another library's figures are for this one; those of another means (NCCL, copy engines) for the same means.
  const bool same_means = ours.by == theirs.by || (ours.by == "deep_ep" && theirs.by == "DeepEP");
  return same_means && ours.benchmark == theirs.benchmark && ours.operation == theirs.operation &&
         fits(ours.dtype, theirs.dtype) && fits(ours.mode, theirs.mode) && fits(ours.part, theirs.part) &&
         fits(ours.nic, theirs.nic);
}

bool same_shape(const Figure& ours, const Figure& theirs) {
  return std::ranges::all_of(kShape, [&](const ShapeColumn& column) {
    return !(theirs.*column.member) || theirs.*column.member == ours.*column.member;
  });
}

std::string show_count(const Figure::Count& count) { return count ? fmt::format("{}", *count) : "not given"; }

/// "tokens 2048 there, 4096 here; nodes 2 there, 1 here"
std::string difference(const Figure& ours, const Figure& theirs) {
  std::string text;
  for (const auto& [name, member] : kShape) {
    if (!(theirs.*member) || theirs.*member == ours.*member) continue;
    text += fmt::format("{}{} {} there, {} here", text.empty() ? "" : "; ", name, show_count(theirs.*member),
                        show_count(ours.*member));
  }
  return text;
}

bool is_better(const Figure& one, const Figure& other) {
  for (const auto& [name, member, more_is_better] : kQuantities) {
    if (!(one.*member) || !(other.*member)) continue;
    return more_is_better ? *(one.*member) > *(other.*member) : *(one.*member) < *(other.*member);
  }
  return false;
}

std::string how_done(const Figure& figure) {
  std::string text = figure.sms ? fmt::format("{} SMs", *figure.sms) : "";
  const auto add = [&](const std::string& more) { text += (text.empty() ? "" : ", ") + more; };
  if (figure.nvl_chunk) add(fmt::format("NVL chunk {}", *figure.nvl_chunk));
  if (figure.rdma_chunk) add(fmt::format("RDMA chunk {}", *figure.rdma_chunk));
  if (!figure.mode.empty() && figure.mode != "-") add(figure.mode);
  return text.empty() ? "-" : text;
}

/// Theirs, of several ways to do one thing the best.
std::vector<Figure> best_of(const std::vector<Figure>& all) {
  std::vector<Figure> best;
  for (const Figure& each : all) {
    if (each.status != "ok") continue;
    const Figure figure = with_plain_groups(each);
    const auto same = std::ranges::find_if(best, [&](const Figure& other) {
      return kind_of(other) == kind_of(figure) && other.by == figure.by &&
             std::ranges::all_of(
                 kShape, [&](const ShapeColumn& column) { return other.*column.member == figure.*column.member; });
    });
    if (same == best.end()) {
      best.push_back(figure);
    } else if (is_better(figure, *same)) {
      *same = figure;
    }
  }
  return best;
}

/// What a file does not say cannot be held against it, but the reader should know.
std::string note_of(const Figure& ours, const Figure& theirs) {
  std::string unknown;
  for (const auto& [name, member] : kShape) {
    if (!(theirs.*member) && ours.*member) unknown += fmt::format("{}{}", unknown.empty() ? "" : ", ", name);
  }
  if (unknown.empty()) return theirs.note;
  return fmt::format("{}{}not given there: {}", theirs.note, theirs.note.empty() ? "" : "; ", unknown);
}

void add_figures(Comparison& comparison, const Figure& ours, const Figure& theirs) {
  for (const auto& [name, member, more_is_better] : kQuantities) {
    if (!(ours.*member) || !(theirs.*member)) continue;
    const double mine = *(ours.*member);
    const double other = *(theirs.*member);
    if (mine <= 0 || other <= 0) continue;
    // The mean says little more than the median.
    if (member == &Figure::mean_us && ours.median_us && theirs.median_us) continue;
    comparison.figures.push_back({.what = kind_of(theirs),
                                  .quantity = name,
                                  .ours = mine,
                                  .theirs = other,
                                  .ratio = more_is_better ? mine / other : other / mine,
                                  .how = fmt::format("{} / {}", how_done(ours), how_done(theirs)),
                                  .note = note_of(ours, theirs)});
  }
}

void compare_one(Comparison& comparison, const std::vector<Figure>& ours, const Figure& theirs) {
  std::optional<Figure> best;
  std::optional<Figure> another;
  for (const Figure& figure : ours) {
    if (!same_kind(figure, theirs)) continue;
    if (!same_shape(figure, theirs)) {
      another = figure;
    } else if (!best || is_better(figure, *best)) {
      best = figure;
    }
  }
  if (best) {
    add_figures(comparison, *best, theirs);
  } else if (another) {
    comparison.refusals.push_back(fmt::format("{} is not compared, because the shape is another: {}", kind_of(theirs),
                                              difference(*another, theirs)));
  }
}

}  // namespace

double Comparison::worst_ratio() const {
  double worst = 0;
  for (const ComparedFigure& figure : figures) worst = worst == 0 ? figure.ratio : std::min(worst, figure.ratio);
  return worst;
}

std::string Comparison::text() const {
  std::string text = fmt::format("\nCompared with {}\n", reference.name);
  for (const auto& [key, value] : reference.provenance) text += fmt::format("  {}: {}\n", key, value);
  if (reference.provenance.empty()) text += "  The file does not say where its figures come from.\n";
  if (!figures.empty()) {
    constexpr const char* kLine = "{:<47}{:<15}{:>10}{:>10}{:>8}  {}\n";
    text += '\n' + fmt::format(kLine, "", "quantity", "ours", "theirs", "ratio", "how (ours / theirs)");
    for (const ComparedFigure& figure : figures) {
      text += fmt::format(kLine, figure.what, figure.quantity, fmt::format("{:.4g}", figure.ours),
                          fmt::format("{:.4g}", figure.theirs), fmt::format("{:.3g}", figure.ratio),
                          figure.how + (figure.note.empty() ? "" : fmt::format(" ({})", figure.note)));
    }
    text += "A ratio above 1 means that ours is faster.\n";
  }
  for (const std::string& line : refusals) text += line + ".\n";
  for (const std::string& line : warnings) text += line + ".\n";
  return text;
}

nlohmann::json Comparison::json() const {
  nlohmann::json all = nlohmann::json::array();
  for (const ComparedFigure& figure : figures) {
    all.push_back({{"what", figure.what},
                   {"quantity", figure.quantity},
                   {"ours", figure.ours},
                   {"theirs", figure.theirs},
                   {"ratio", figure.ratio},
                   {"how", figure.how},
                   {"note", figure.note}});
  }
  nlohmann::json origin = nlohmann::json::object();
  for (const auto& [key, value] : reference.provenance) origin[key] = value;
  return {{"file", reference.name},
          {"provenance", origin},
          {"figures", all},
          {"refusals", refusals},
          {"warnings", warnings}};
}

Comparison compare(const std::vector<Figure>& ours, const ResultFile& reference) {
  Comparison comparison{.reference = reference, .figures = {}, .refusals = {}, .warnings = {}};
  std::vector<Figure> usable;
  for (const Figure& figure : ours) {
    if (figure.status == "ok") usable.push_back(with_plain_groups(figure));
  }
  const std::vector<Figure> theirs = best_of(reference.figures);
  for (const Figure& figure : theirs) compare_one(comparison, usable, figure);
  if (comparison.figures.empty() && comparison.refusals.empty()) {
    comparison.refusals.emplace_back("nothing is compared, because nothing in that file is of this benchmark");
  }
  const auto on = [](const char* device) { return [=](const Figure& figure) { return figure.device == device; }; };
  if (std::ranges::any_of(usable, on("cpu")) && !std::ranges::any_of(theirs, on("cpu"))) {
    comparison.warnings.emplace_back("Ours ran on the CPU, which is no measure of speed");
  }
  return comparison;
}

}  // namespace deep_ep::tools
