#include "tools/bench/output/compare.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace deep_ep::tools {
namespace {

template <class Member>
struct Field {
  const char* name;
  Member Figure::*member;
  bool more_is_better = false;
};
constexpr Field<Figure::Count> kShape[] = {
    {"ranks", &Figure::ranks}, {"nodes", &Figure::nodes},     {"tokens", &Figure::tokens}, {"hidden", &Figure::hidden},
    {"topk", &Figure::topk},   {"experts", &Figure::experts}, {"groups", &Figure::groups}, {"bytes", &Figure::bytes}};
constexpr Field<Figure::Number> kQuantities[] = {{"gb_per_s", &Figure::gb_per_s, true},
                                                 {"rdma_gb_per_s", &Figure::rdma_gb_per_s, true},
                                                 {"median_us", &Figure::median_us},
                                                 {"mean_us", &Figure::mean_us}};

void append(std::string& list, const char* separator, const std::string& one) {
  list += (list.empty() ? "" : separator) + one;
}

/// The figures that count. Experts on all nodes become one number: a file writes 0, or the number of nodes.
std::vector<Figure> usable(std::vector<Figure> figures) {
  std::erase_if(figures, [](const Figure& figure) { return figure.status != "ok"; });
  for (Figure& figure : figures) {
    if (figure.nodes && (figure.groups == 0 || *figure.nodes == 1)) figure.groups = figure.nodes;
  }
  return figures;
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
  // Another library's figures are for this one; those of NCCL for NCCL's.
  const bool same_means = ours.by == theirs.by || (ours.by == "deep_ep" && theirs.by == "DeepEP");
  return same_means && ours.benchmark == theirs.benchmark && ours.operation == theirs.operation &&
         fits(ours.dtype, theirs.dtype) && fits(ours.mode, theirs.mode) && fits(ours.part, theirs.part) &&
         fits(ours.nic, theirs.nic);
}

/// "tokens 2048 there, 4096 here; nodes 2 there, 1 here": the parts of the shape that differ from their file's.
std::string difference(const Figure& ours, const Figure& theirs) {
  std::string text;
  for (const auto& [name, member, ignored] : kShape) {
    const Figure::Count &mine = ours.*member, &other = theirs.*member;
    if (!other || other == mine) continue;
    append(text, "; ",
           fmt::format("{} {} there, {} here", name, *other, mine ? fmt::format("{}", *mine) : "not given"));
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
  std::string text;
  if (figure.sms) append(text, ", ", fmt::format("{} SMs", *figure.sms));
  if (figure.nvl_chunk) append(text, ", ", fmt::format("NVL chunk {}", *figure.nvl_chunk));
  if (figure.rdma_chunk) append(text, ", ", fmt::format("RDMA chunk {}", *figure.rdma_chunk));
  if (!figure.mode.empty() && figure.mode != "-") append(text, ", ", figure.mode);
  return text.empty() ? "-" : text;
}

/// Theirs, of several ways to do one thing the best.
std::vector<Figure> best_of(const std::vector<Figure>& all) {
  std::vector<Figure> best;
  for (const Figure& figure : all) {
    const auto same = std::ranges::find_if(best, [&](const Figure& other) {
      return kind_of(other) == kind_of(figure) && other.by == figure.by &&
             std::ranges::all_of(kShape, [&](const auto& f) { return other.*f.member == figure.*f.member; });
    });
    if (same == best.end()) {
      best.push_back(figure);
    } else if (is_better(figure, *same)) {
      *same = figure;
    }
  }
  return best;
}

/// Names the facts that a file lacks: they do not count against it, but the reader should know.
std::string note_of(const Figure& ours, const Figure& theirs) {
  std::string unknown;
  for (const auto& [name, member, ignored] : kShape) {
    if (!(theirs.*member) && ours.*member) append(unknown, ", ", name);
  }
  std::string note = theirs.note;
  if (!unknown.empty()) append(note, "; ", "not given there: " + unknown);
  return note;
}

void add_figures(Comparison& comparison, const Figure& ours, const Figure& theirs) {
  for (const auto& [name, member, more_is_better] : kQuantities) {
    const double mine = (ours.*member).value_or(0);
    const double other = (theirs.*member).value_or(0);
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
  const Figure* best = nullptr;
  std::string another;  // how the shape of what is of this kind differs
  for (const Figure& figure : ours) {
    if (!same_kind(figure, theirs)) continue;
    if (std::string found = difference(figure, theirs); !found.empty()) {
      another = std::move(found);
    } else if (best == nullptr || is_better(figure, *best)) {
      best = &figure;
    }
  }
  if (best != nullptr) {
    add_figures(comparison, *best, theirs);
  } else if (!another.empty()) {
    comparison.refusals.push_back(
        fmt::format("{} is not compared, because the shape is another: {}", kind_of(theirs), another));
  }
}

}  // namespace

double Comparison::worst_ratio() const {
  const auto worst = std::ranges::min_element(figures, {}, &ComparedFigure::ratio);
  return worst == figures.end() ? 0 : worst->ratio;
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

Comparison compare(const std::vector<Figure>& all_of_ours, const ResultFile& reference) {
  Comparison comparison{.reference = reference};
  const std::vector<Figure> ours = usable(all_of_ours);
  const std::vector<Figure> theirs = best_of(usable(reference.figures));
  for (const Figure& figure : theirs) compare_one(comparison, ours, figure);
  if (comparison.figures.empty() && comparison.refusals.empty()) {
    comparison.refusals.emplace_back("nothing is compared, because nothing in that file is of this benchmark");
  }
  const auto on_cpu = [](const Figure& figure) { return figure.device == "cpu"; };
  if (std::ranges::any_of(ours, on_cpu) && std::ranges::none_of(theirs, on_cpu)) {
    comparison.warnings.emplace_back("Ours ran on the CPU, which is no measure of speed");
  }
  return comparison;
}

}  // namespace deep_ep::tools
