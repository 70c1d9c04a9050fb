// Outputs that all benchmarks share: CSV, files of results, comparison.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "deep_ep/error.hpp"
#include "tools/bench/output/compare.hpp"
#include "tools/bench/output/results.hpp"

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

ResultFile parsed(const std::string& text) {
  std::istringstream stream(text);
  return parse_results(stream, "f.csv");
}

TEST(BenchCsv, FieldsComeBackAsTheyWere) {
  const std::vector<std::string> fields = {"", "plain", "a,b", "say \"so\"", "#no comment", ""};
  EXPECT_EQ(csv_line(fields), ",plain,\"a,b\",\"say \"\"so\"\"\",\"#no comment\",\n");
  EXPECT_EQ(csv_fields(",plain,\"a,b\",\"say \"\"so\"\"\",\"#no comment\","), fields);
  EXPECT_EQ(csv_line({"two\r\nlines"}), "two  lines\n") << "a line is a measurement";
  EXPECT_NE(error_of([] { csv_fields("a,\"b"); }).find("does not end with one"), std::string::npos);
}

TEST(BenchFigure, EveryColumnGoesToCsvAndBack) {
  Figure figure;
  int number = 0;
  for (const FigureColumn& column : figure_columns()) set_field(figure, column, std::to_string(++number));
  const ResultFile file = parsed(figure_csv_header() + figure_csv_line(figure));
  ASSERT_EQ(file.figures.size(), 1u);
  EXPECT_EQ(figure_csv_line(file.figures[0]), figure_csv_line(figure));
  std::set<std::string> names;
  for (const FigureColumn& column : figure_columns()) names.insert(column.name);
  EXPECT_EQ(names.size(), figure_columns().size());
}

TEST(BenchResults, SaysWhatIsWrongAndWhere) {
  const auto error = [](const std::string& text) { return error_of([&] { parsed(text); }); };
  EXPECT_EQ(error(""), "f.csv: there is no line of column names in it");
  EXPECT_EQ(error("# x: y\nranks,size\n"), "f.csv line 2: 'size' is no column of `deep_ep bench --csv`");
  EXPECT_EQ(error("ranks,ranks\n"), "f.csv line 1: column 'ranks' is there twice");
  EXPECT_EQ(error("ranks\r\n\r\n\"8\r\n"), "f.csv line 3: a field begins with a quote and does not end with one");
  EXPECT_EQ(error("ranks,tokens\n8\n"), "f.csv line 2: 1 fields, but 2 columns");
  EXPECT_EQ(error("ranks\n8\n8x\n"), "f.csv line 3: column ranks: '8x' is no whole number");
  EXPECT_EQ(error("gb_per_s\nnan\n"), "f.csv line 2: column gb_per_s: 'nan' is no number");
}

TEST(BenchResults, ProvenanceGoesOnOverLines) {
  const ResultFile file = parsed("# source: a guide\n#   of two lines\n# date: 2026-01-02\nranks\n8\n");
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

}  // namespace
}  // namespace deep_ep::tools
