// What all benchmarks share: CSV, files of results, comparison, plots.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>

#include "deep_ep/error.hpp"
#include "tools/bench/output/compare.hpp"
#include "tools/bench/output/csv.hpp"
#include "tools/bench/output/plot.hpp"
#include "tools/bench/output/results.hpp"
#include "tools/bench/output/svg.hpp"

namespace deep_ep::tools {
namespace {

namespace fs = std::filesystem;

template <class Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

Figure dispatch(std::int64_t tokens, double rate, std::int64_t sms = 24) {
  Figure figure;
  figure.benchmark = "intranode";
  figure.operation = "dispatch";
  figure.dtype = "fp8";
  figure.mode = "cached";
  figure.by = "deep_ep";
  figure.device = "cuda";
  figure.ranks = 8;
  figure.nodes = 1;
  figure.tokens = tokens;
  figure.sms = sms;
  figure.gb_per_s = rate;
  return figure;
}

TEST(BenchCsv, FieldsComeBackAsTheyWere) {
  const std::vector<std::string> fields = {"", "plain", "a,b", "say \"so\"", "two\nlines", "#no comment", ""};
  const CsvText text = parse_csv("# key: value\n\n" + csv_line(fields) + csv_line({"1"}), "file");
  ASSERT_EQ(text.rows.size(), 2u);
  EXPECT_EQ(text.rows[0].fields, fields);
  EXPECT_EQ(text.rows[0].line, 3);
  EXPECT_EQ(text.rows[1].line, 5);
  EXPECT_EQ(text.comments, std::vector<std::string>{" key: value"});
  EXPECT_TRUE(text.ends_with_line);
  EXPECT_FALSE(parse_csv("a,b", "file").ends_with_line);
  EXPECT_EQ(parse_csv("a,b\r\nc,d\r\n", "file").rows[1].fields, (std::vector<std::string>{"c", "d"}));
  EXPECT_NE(error_of([] { parse_csv("a\n\"b", "file"); }).find("file line 2"), std::string::npos);
}

TEST(BenchFigure, EveryColumnGoesToCsvAndBack) {
  Figure figure;
  int number = 0;
  for (const FigureColumn& column : figure_columns()) set_field(figure, column, std::to_string(++number));
  const ResultFile file = parse_results(figure_csv_header() + figure_csv_line(figure), "file");
  ASSERT_EQ(file.figures.size(), 1u);
  EXPECT_EQ(figure_csv_line(file.figures[0]), figure_csv_line(figure));
  std::set<std::string> names;
  for (const FigureColumn& column : figure_columns()) names.insert(column.name);
  EXPECT_EQ(names.size(), figure_columns().size());
}

TEST(BenchResults, SaysWhatIsWrongAndWhere) {
  const auto error = [](const std::string& text) { return error_of([&] { parse_results(text, "f.csv"); }); };
  EXPECT_EQ(error(""), "f.csv: there is no line of column names in it");
  EXPECT_EQ(error("# x: y\nranks,size\n"), "f.csv line 2: 'size' is no column of `deep_ep bench --csv`");
  EXPECT_EQ(error("ranks,ranks\n"), "f.csv line 1: column 'ranks' is there twice");
  EXPECT_EQ(error("ranks,tokens\n8\n"), "f.csv line 2: 1 fields, but 2 columns");
  EXPECT_EQ(error("ranks\n8\n8x\n"), "f.csv line 3, column ranks: '8x' is no whole number");
  EXPECT_EQ(error("gb_per_s\nnan\n"), "f.csv line 2, column gb_per_s: 'nan' is no number");
}

TEST(BenchResults, ProvenanceGoesOnOverLines) {
  const ResultFile file = parse_results("# source: a guide\n#   of two lines\n# date: 2026-01-02\nranks\n8\n", "f");
  EXPECT_EQ(file.provenance_of("source"), "a guide of two lines");
  EXPECT_EQ(file.provenance_of("date"), "2026-01-02");
  EXPECT_EQ(file.provenance_of("command"), "");
}

TEST(BenchResults, AreFoundBesideTheProgram) {
  const fs::path root = fs::path(testing::TempDir()) / "deep_ep_find_results";
  fs::remove_all(root);
  fs::create_directories(root / "bin");
  fs::create_directories(root / "share/deep_ep/results");
  std::ofstream(root / "share/deep_ep/results/some-gpu.csv") << "ranks\n8\n";
  EXPECT_EQ(find_results("some-gpu", root / "bin/deep_ep"), root / "share/deep_ep/results/some-gpu.csv");
  EXPECT_EQ(error_of([&] { find_results("other", root / "bin/deep_ep"); }),
            "--compare other: there is no such file; with the library come some-gpu");
  fs::create_directories(root / "source/results");
  fs::create_directories(root / "source/build/host/bin");
  std::ofstream(root / "source/results/tree.csv") << "ranks\n8\n";
  EXPECT_EQ(find_results("tree", root / "source/build/host/bin/deep_ep"), root / "source/results/tree.csv");
  fs::remove_all(root);
}

TEST(BenchResults, FilesOfTheSourceTreeSayWhereTheyComeFrom) {
  int files = 0;
  for (const auto& entry : fs::directory_iterator(DEEP_EP_RESULTS)) {
    if (entry.path().extension() != ".csv") continue;
    SCOPED_TRACE(entry.path().filename().string());
    ++files;
    const ResultFile file = read_results(entry.path().string());
    for (const char* key : {"source", "date", "hardware", "software", "command", "gb_per_s"}) {
      EXPECT_NE(file.provenance_of(key), "") << key;
    }
    EXPECT_TRUE(std::regex_match(file.provenance_of("date"), std::regex("20[0-9]{2}-[01][0-9]-[0-3][0-9]|not given")));
    EXPECT_FALSE(file.figures.empty());
    const bool is_ours = file.figures.front().by == "deep_ep";
    if (is_ours) {
      EXPECT_TRUE(std::regex_search(file.provenance_of("software"), std::regex("commit [0-9a-f]{7}")));
    }
    for (const Figure& figure : file.figures) {
      EXPECT_FALSE(figure.benchmark.empty() || figure.operation.empty() || figure.by.empty());
      EXPECT_EQ(figure.status, "ok");
      EXPECT_TRUE(figure.ranks && figure.nodes);
      EXPECT_TRUE(figure.gb_per_s || figure.rdma_gb_per_s || figure.rdma_wire_gb_per_s || figure.median_us ||
                  figure.mean_us || figure.pipelined_us);
      if (figure.benchmark == "nccl") continue;
      EXPECT_TRUE(figure.tokens && figure.hidden && figure.topk && figure.experts);
    }
  }
  EXPECT_GE(files, 5);
}

TEST(BenchCompare, TakesTheBestOfEachSide) {
  ResultFile theirs{.name = "theirs", .provenance = {{"source", "a guide"}}, .figures = {}};
  for (const double rate : {100.0, 300.0, 200.0}) {
    theirs.figures.push_back(dispatch(2048, rate, static_cast<std::int64_t>(rate)));
    theirs.figures.back().by = "DeepEP";
    theirs.figures.back().mode = "";
  }
  const Comparison comparison = compare({dispatch(2048, 330, 8), dispatch(2048, 250, 16)}, theirs);
  ASSERT_EQ(comparison.figures.size(), 1u);
  EXPECT_EQ(comparison.figures[0].ours, 330);
  EXPECT_EQ(comparison.figures[0].theirs, 300);
  EXPECT_DOUBLE_EQ(comparison.worst_ratio(), 1.1);
  EXPECT_EQ(comparison.figures[0].how, "8 SMs, cached / 300 SMs");
  EXPECT_TRUE(comparison.refusals.empty() && comparison.warnings.empty());
  EXPECT_NE(comparison.text().find("source: a guide"), std::string::npos);
}

TEST(BenchCompare, LessTimeIsFaster) {
  Figure ours = dispatch(8, 0);
  Figure theirs = ours;
  ours.gb_per_s.reset();
  theirs.gb_per_s.reset();
  ours.median_us = 50;
  theirs.median_us = 100;
  const Comparison comparison = compare({ours}, {.name = "f", .provenance = {}, .figures = {theirs}});
  ASSERT_EQ(comparison.figures.size(), 1u);
  EXPECT_EQ(comparison.figures[0].quantity, "median_us");
  EXPECT_EQ(comparison.figures[0].ratio, 2);
}

TEST(BenchCompare, RefusesAnotherShapeWithASentence) {
  Figure theirs = dispatch(2048, 300);
  theirs.by = "DeepEP";
  const ResultFile file{.name = "f", .provenance = {}, .figures = {theirs}};
  const Comparison other_tokens = compare({dispatch(4096, 330)}, file);
  EXPECT_TRUE(other_tokens.figures.empty());
  ASSERT_EQ(other_tokens.refusals.size(), 1u);
  EXPECT_EQ(
      other_tokens.refusals[0],
      "intranode dispatch fp8 cached is not compared, because the shape is another: tokens 2048 there, 4096 here");
  Figure combine = dispatch(2048, 300);
  combine.operation = "combine";
  const Comparison nothing = compare({combine}, file);
  EXPECT_TRUE(nothing.figures.empty());
  EXPECT_EQ(nothing.refusals[0], "nothing is compared, because nothing in that file is of this benchmark");
}

TEST(BenchCompare, SaysWhatTheFileLeavesOpen) {
  Figure theirs = dispatch(2048, 300);
  theirs.tokens.reset();
  theirs.by = "DeepEP";
  Figure ours = dispatch(4096, 330);
  ours.device = "cpu";
  const Comparison comparison = compare({ours}, {.name = "f", .provenance = {}, .figures = {theirs}});
  ASSERT_EQ(comparison.figures.size(), 1u);
  EXPECT_EQ(comparison.figures[0].note, "not given there: tokens");
  EXPECT_EQ(comparison.warnings, std::vector<std::string>{"Ours ran on the CPU, which is no measure of speed"});
  Figure nccl = theirs;
  nccl.by = "NCCL 2.30.7";  // another means for the same bytes is no peer of ours
  EXPECT_TRUE(compare({ours}, {.name = "f", .provenance = {}, .figures = {nccl}}).figures.empty());
}

/// A circle of an SVG, in places of the picture.
struct Circle {
  double x, y;
};

/// What a reader of the picture sees, from its text.
class Picture {
 public:
  explicit Picture(const std::string& svg) : svg_(svg) {
    each(R"re(<circle cx="([0-9.]+)" cy="([0-9.]+)"[^>]*><title>([^<]*)</title>)re", [&](const std::smatch& found) {
      points[found[3]] = {std::stod(found[1]), std::stod(found[2])};
    });
    each(R"re(<text x="([0-9.]+)" y="([0-9.]+)"[^>]*class="x-tick">([^<]*)<)re",
         [&](const std::smatch& found) { x_ticks[found[3]] = std::stod(found[1]); });
    each(R"re(<text x="([0-9.]+)" y="([0-9.]+)"[^>]*class="y-tick">([^<]*)<)re",
         [&](const std::smatch& found) { y_ticks[std::stod(found[3])] = std::stod(found[2]) - 4; });
    each(R"re(class="legend">([^<]*)<)re", [&](const std::smatch& found) { legend.push_back(found[1]); });
    each(R"re(<polyline )re", [&](const std::smatch&) { ++polylines; });
  }
  /// The number that the y axis shows at a height.
  double y_value(double y) const {
    const auto& [low, low_y] = *y_ticks.begin();
    const auto& [high, high_y] = *y_ticks.rbegin();
    return low + (y - low_y) / (high_y - low_y) * (high - low);
  }

  std::map<std::string, Circle> points;
  std::map<std::string, double> x_ticks;
  std::map<double, double> y_ticks;
  std::vector<std::string> legend;
  int polylines = 0;

 private:
  template <class Use>
  void each(const char* pattern, Use&& use) {
    const std::regex regex(pattern);
    for (std::sregex_iterator at(svg_.begin(), svg_.end(), regex); at != std::sregex_iterator(); ++at) use(*at);
  }
  std::string svg_;
};

TEST(BenchPlot, PointsStandWhereTheAxesSay) {
  std::vector<Figure> figures = {dispatch(4096, 118, 4), dispatch(4096, 236, 8), dispatch(4096, 316.85, 24)};
  figures.push_back(dispatch(4096, 90, 4));
  figures.back().operation = "combine & <more>";
  const Chart chart = plot_bandwidth(figures, "sms");
  const Picture picture(to_svg(chart));
  EXPECT_EQ(picture.legend, (std::vector<std::string>{"dispatch fp8 cached", "combine &amp; &lt;more&gt; fp8 cached"}));
  ASSERT_EQ(picture.points.size(), 4u);
  EXPECT_EQ(picture.polylines, 1);  // one point is no line
  for (const auto& [name, x, y] :
       {std::tuple{"dispatch fp8 cached: 4, 118", "4", 118.0}, std::tuple{"dispatch fp8 cached: 8, 236", "8", 236.0},
        std::tuple{"dispatch fp8 cached: 24, 316.85", "24", 316.85}}) {
    ASSERT_TRUE(picture.points.contains(name)) << name;
    EXPECT_NEAR(picture.points.at(name).x, picture.x_ticks.at(x), 0.11);
    EXPECT_NEAR(picture.y_value(picture.points.at(name).y), y, 1);
  }
  EXPECT_GE(picture.y_ticks.rbegin()->first, 316.85);
  EXPECT_EQ(picture.y_ticks.begin()->first, 0);
}

TEST(BenchPlot, ChoosesItsAxis) {
  EXPECT_EQ(plot_bandwidth({dispatch(128, 1), dispatch(4096, 2)}, "").x_label, "tokens per rank");
  EXPECT_EQ(plot_bandwidth({dispatch(128, 1, 4), dispatch(128, 2, 8)}, "").x_label, "SMs");
  EXPECT_EQ(plot_bandwidth({dispatch(128, 1)}, "").x_label, "tokens per rank");
  EXPECT_EQ(error_of([] { plot_bandwidth({dispatch(128, 1)}, "rdma_chunk"); }),
            "there is nothing to plot: no measurement has a bandwidth and rows in a chunk by RDMA");
}

TEST(BenchPlot, BetweenNodesHasTwoLines) {
  Figure figure = dispatch(128, 100);
  figure.rdma_gb_per_s = 40;
  Figure failed = dispatch(128, 900);
  failed.status = "failed";
  const Chart chart = plot_bandwidth({figure, failed}, "tokens");
  ASSERT_EQ(chart.lines.size(), 2u);
  EXPECT_EQ(chart.lines[0].name, "dispatch fp8 cached (NVLink)");
  EXPECT_EQ(chart.lines[1].name, "dispatch fp8 cached (RDMA)");
  EXPECT_EQ(chart.lines[1].points.front().second, 40);
}

TEST(BenchPlot, TakesWhatCrossesWhereThereIsNothingElse) {
  Figure figure = dispatch(128, 0);
  figure.gb_per_s.reset();
  figure.rdma_wire_gb_per_s = 24;
  const Chart chart = plot_bandwidth({figure}, "tokens");
  ASSERT_EQ(chart.lines.size(), 1u);
  EXPECT_EQ(chart.lines[0].name, "dispatch fp8 cached (RDMA wire)");
}

TEST(BenchPlot, WideAxesAreLogarithmic) {
  const Picture picture(to_svg(plot_bandwidth({dispatch(1, 1), dispatch(64, 2), dispatch(4096, 3)}, "tokens")));
  EXPECT_NEAR(picture.x_ticks.at("64") - picture.x_ticks.at("1"), picture.x_ticks.at("4096") - picture.x_ticks.at("64"),
              0.3);
}

TEST(BenchPlot, TicksReachTheLargest) {
  EXPECT_GE(ticks_up_to(0).size(), 2u);
  for (const double largest : {0.003, 1.0, 7.5, 99.0, 101.0, 316.85, 12345.0}) {
    const std::vector<double> ticks = ticks_up_to(largest);
    EXPECT_GE(ticks.back(), largest);
    EXPECT_LT(ticks[ticks.size() - 2], largest);
    EXPECT_LE(ticks.size(), 8u);
    EXPECT_GE(ticks.size(), 4u);
  }
}

}  // namespace
}  // namespace deep_ep::tools
