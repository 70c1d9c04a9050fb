// What benchmarks read and go on with: tables of nccl-tests, files of sweeps, other processes; and that the selftest
// notices mistakes.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <string>

#include "deep_ep/error.hpp"
#include "tools/bench/nccl_table.hpp"
#include "tools/bench/output/results.hpp"
#include "tools/bench/selftest_rank.hpp"
#include "tools/bench/sweep.hpp"
#include "tools/common/child.hpp"

namespace deep_ep::tools {
namespace {

template <class Call>
std::string error_in(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

/// As all_reduce_perf prints it on 16 ranks. The figures are made up, and fit each other.
std::string nccl_log(const std::string& rows, const std::string& end) {
  return "# nThread 1 nGpus 1 minBytes 2097152 maxBytes 4194304 step: 2(factor) warmup iters: 10\n"
         "node-a:71:71 [0] NCCL INFO Using network gIB\n"
         "#                                                              out-of-place                       in-place\n"
         "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   "
         "busbw "
         "#wrong\n"
         "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  "
         "(GB/s)\n" +
         rows + end;
}
constexpr const char* kRows =
    "     2097152        524288     float     sum      -1    131.1   16.00   30.00      0    130.0   16.13   30.24     "
    " 0\n"
    "node-a:71:71 [0] NCCL INFO a line of the log in between\n"
    "     4194304       1048576     float     sum      -1    209.7   20.00   37.50      0    209.7   20.00   37.50     "
    " 0\n";
constexpr const char* kEnd = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 33.81 \n#\n";

TEST(NcclTable, IsReadAndChecked) {
  const NcclReport report = parse_nccl_tests(nccl_log(kRows, kEnd), "log", {});
  EXPECT_TRUE(report.mistakes.empty()) << report.mistakes.front();
  ASSERT_EQ(report.figures.size(), 4u);
  const Figure& figure = report.figures[1];
  EXPECT_EQ(figure.operation, "all_reduce");
  EXPECT_EQ(figure.mode, "in place");
  EXPECT_EQ(figure.part, "sum");
  EXPECT_EQ(figure.ranks, 16);  // by the bandwidths: nothing else says so
  EXPECT_EQ(figure.bytes, 2097152);
  EXPECT_EQ(figure.mean_us, 130.0);
  EXPECT_EQ(figure.alg_gb_per_s, 16.13);
  EXPECT_EQ(figure.gb_per_s, 30.24);
  ASSERT_EQ(report.tables.size(), 1u);
  EXPECT_EQ(report.tables[0],
            "log: all_reduce of 16 ranks (by the bandwidths), 2 sizes; bus bandwidth at most 37.50 GB/s, average 33.81 "
            "GB/s; data checked");
}

TEST(NcclTable, MarksOfMpirunAreNoPartOfIt) {
  std::string marked;
  for (const char c : nccl_log(kRows, kEnd)) {
    if (marked.empty() || marked.back() == '\n') marked += "[1,0]<stdout>:";
    marked += c;
  }
  EXPECT_EQ(parse_nccl_tests(marked, "log", {}).figures.size(), 4u);
}

TEST(NcclTable, TextNamesCollectiveAndRanks) {
  const std::string text =
      "# Collective test starting: all_gather_perf\n#  Rank  0 Group  0 Pid 1 on a device  0 [0x00] B200\n"
      "#  Rank  1 Group  0 Pid 2 on a device  1 [0x00] B200\n" +
      nccl_log("  1024  256  float  none  -1  10.0  20.00  10.00  N/A  10.0  20.00  10.00  N/A\n",
               "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 10\n");
  const NcclReport report = parse_nccl_tests(text, "log", {});
  EXPECT_TRUE(report.mistakes.empty()) << report.mistakes.front();
  EXPECT_EQ(report.figures[0].operation, "all_gather");
  EXPECT_EQ(report.figures[0].ranks, 2);
  EXPECT_EQ(report.figures[0].note, "data not checked");
}

TEST(NcclTable, WrongDataIsAMistake) {
  std::string rows = kRows;
  rows.replace(rows.rfind("      0\n"), 8, "     17\n");
  const NcclReport report = parse_nccl_tests(nccl_log(rows, kEnd), "log", {});
  ASSERT_EQ(report.mistakes.size(), 1u);
  EXPECT_EQ(report.mistakes[0], "log line 8: 17 wrong values in place");
}

TEST(NcclTable, BandwidthsMustFit) {
  const NcclReport eight = parse_nccl_tests(nccl_log(kRows, kEnd), "log", {.ranks = 8});
  ASSERT_EQ(eight.mistakes.size(), 4u);
  EXPECT_NE(eight.mistakes[0].find("log line 6: busbw 30 out of place does not fit algbw 16: all_reduce of 8 ranks"),
            std::string::npos);
}

TEST(NcclTable, MissingRowsAndEndsAreMistakes) {
  const NcclReport cut = parse_nccl_tests(nccl_log(kRows, ""), "log", {});
  ASSERT_EQ(cut.mistakes.size(), 1u);
  EXPECT_NE(cut.mistakes[0].find("line 4 has no line '# Avg bus bandwidth'"), std::string::npos);
  EXPECT_TRUE(parse_nccl_tests(nccl_log(kRows, ""), "log", {.allow_partial = true}).mistakes.empty());
  const std::string rows = kRows;
  const std::string in_a_row = rows.substr(0, rows.size() - 20) + "\n";
  EXPECT_TRUE(parse_nccl_tests(nccl_log(in_a_row, ""), "log", {.allow_partial = true}).mistakes.empty());
  EXPECT_NE(error_in([&] {
              parse_nccl_tests(nccl_log(in_a_row + rows, ""), "log", {.allow_partial = true});
            }).find("is no row"),
            std::string::npos);
  const NcclReport missing = parse_nccl_tests(nccl_log(rows.substr(0, rows.find('\n') + 1), kEnd), "log", {});
  ASSERT_EQ(missing.mistakes.size(), 1u);
  EXPECT_NE(missing.mistakes[0].find("rows are missing"), std::string::npos);
  EXPECT_FALSE(parse_nccl_tests(nccl_log("", kEnd), "log", {}).mistakes.empty());
}

TEST(NcclTable, LongLinesAreNoTrouble) {
  const std::string logged = std::string(1 << 20, 'a') + "\n" + nccl_log(kRows, kEnd);
  EXPECT_TRUE(parse_nccl_tests(logged, "log", {}).mistakes.empty());
}

TEST(NcclTable, GarbageIsRefusedWithItsLine) {
  EXPECT_NE(error_in([] { parse_nccl_tests("hello\n", "log", {}); }).find("no table of nccl-tests in its 1 lines"),
            std::string::npos);
  EXPECT_EQ(error_in([] { parse_nccl_tests(nccl_log("Segmentation fault (core dumped)\n", kEnd), "log", {}); }),
            "log line 6: 'Segmentation fault (core dumped)' is no row of nccl-tests' table: 4 columns, expected 13");
  std::string rows = kRows;
  rows.replace(rows.find("16.00"), 5, "16,00");
  EXPECT_EQ(error_in([&] { parse_nccl_tests(nccl_log(rows, kEnd), "log", {}); }),
            "log line 6: algbw is '16,00', expected a number");
  EXPECT_NE(error_in([] {
              parse_nccl_tests(nccl_log(kRows, kEnd), "log", {.collective = "gossip"});
            }).find("--collective gossip: allowed: all_reduce"),
            std::string::npos);
}

/// A sweep's file with two shapes of two lines each and a failure.
struct SavedSweep {
  SavedSweep() {
    for (std::size_t i = 0; i < cells.size(); ++i) {
      cells[i] = {"intranode", 4, 1, static_cast<std::int64_t>(8 * (i + 1)), 256, 4, 16, 0};
      for (const char* operation : {"dispatch", "combine"}) {
        Figure figure = cells[i].figure();
        figure.operation = operation;
        lines[i] += figure_csv_line(figure);
      }
    }
    Figure figure = cells[2].figure();
    figure.status = "failed";
    figure.note = "it took too long";
    lines[2] = figure_csv_line(figure);
  }
  std::string head = "# date: 2026-01-02\n" + figure_csv_header();
  std::array<SweepCell, 3> cells;
  std::array<std::string, 3> lines;
};

TEST(SweepFile, GoesOnBehindWhatIsThere) {
  const SavedSweep saved;
  const SweepFile file = resume_sweep(saved.head + saved.lines[0] + saved.lines[1], "f", "cpu");
  EXPECT_FALSE(file.repaired);
  EXPECT_EQ(file.text, saved.head + saved.lines[0] + saved.lines[1]);
  EXPECT_EQ(file.done, (std::vector<SweepCell>{saved.cells[0], saved.cells[1]}));
}

TEST(SweepFile, WhatAnotherDeviceDidIsMeasuredHere) {
  const SavedSweep saved;
  Figure figure = saved.cells[0].figure();
  figure.device = "cuda";
  const std::string text = saved.head + figure_csv_line(figure) + saved.lines[1];
  EXPECT_EQ(resume_sweep(text, "f", "cuda").done, (std::vector<SweepCell>{saved.cells[0], saved.cells[1]}));
  const SweepFile file = resume_sweep(text, "f", "cpu");
  EXPECT_EQ(file.done, std::vector<SweepCell>{saved.cells[1]}) << "of the other shape it is not known";
  EXPECT_EQ(file.text, text) << "nothing is lost";
}

TEST(SweepFile, FailuresAreTriedAgain) {
  const SavedSweep saved;
  const SweepFile file = resume_sweep(saved.head + saved.lines[0] + saved.lines[2], "f", "cpu");
  EXPECT_TRUE(file.repaired);
  EXPECT_EQ(file.text, saved.head + saved.lines[0]);
}

TEST(SweepFile, AShapeThatWasCutShortIsMeasuredAgain) {
  const SavedSweep saved;
  const std::string whole = saved.head + saved.lines[0] + saved.lines[1];
  const std::size_t last_line = whole.size() - 1 - whole.rfind('\n', whole.size() - 2);
  for (std::size_t missing = 1; missing < last_line; ++missing) {
    const SweepFile file = resume_sweep(whole.substr(0, whole.size() - missing), "f", "cpu");
    EXPECT_TRUE(file.repaired);
    EXPECT_EQ(file.text, saved.head + saved.lines[0]) << missing;
  }
  EXPECT_NE(error_in([] { resume_sweep("what,is,this\n", "f", "cpu"); }).find("f line 1"), std::string::npos);
}

TEST(Sweep, KnowsWhatCannotBe) {
  EXPECT_EQ(why_impossible({"intranode", 4, 1, 8, 256, 4, 16, 0}), "");
  EXPECT_NE(why_impossible({"intranode", 4, 1, 8, 256, 32, 16, 0}).find("--topk 32"), std::string::npos);
  EXPECT_NE(why_impossible({"internode", 4, 2, 8, 256, 20, 32, 1}).find("--topk 20"), std::string::npos);
  SweepOptions options;
  options.modes = {"intranode", "internode"};
  options.hidden = {256, 512};
  options.topk = {4};
  options.experts_per_node = {8};
  options.groups = {1, 2};
  options.tokens = {8, 16};
  options.ranks = 4;
  const std::vector<SweepCell> cells = cells_of(options);
  EXPECT_EQ(cells.size(), 2u * 2 + 2 * 2 * 2);
  EXPECT_EQ(cells.back(), (SweepCell{"internode", 4, 2, 16, 512, 4, 16, 2}));
}

TEST(Children, GiveOutputStatusAndReason) {
  const auto results =
      run_children({{.words = {"sh", "-c", "echo out; echo $NAME >&2"}, .variables = {{"NAME", "deep_ep: why"}}}}, 60);
  EXPECT_EQ(results[0].output, "out\n");
  EXPECT_TRUE(results[0].well());
  EXPECT_EQ(results[0].reason(), "why");
  const ChildResult killed = run_children({{.words = {"sh", "-c", "kill -9 $$"}}}, 60)[0];
  EXPECT_EQ(killed.status, 128 + 9);
  EXPECT_EQ(killed.reason(), "it was ended by signal 9");
  const ChildResult absent = run_children({{.words = {"/nonexistent/program"}}}, 60)[0];
  EXPECT_EQ(absent.status, 127);
  EXPECT_EQ(absent.reason(), "/nonexistent/program: No such file or directory");
}

TEST(Children, WhoPrintsTooMuchIsEnded) {
  const ChildResult endless = run_children({{.words = {"yes"}, .most_output = 1 << 20}}, 600)[0];
  EXPECT_TRUE(endless.too_long);
  EXPECT_FALSE(endless.well());
  EXPECT_LT(endless.output.size(), std::size_t{2} << 20);
  EXPECT_EQ(endless.reason(), "it printed too much");
}

TEST(Children, EndTogether) {
  const auto begin = std::chrono::steady_clock::now();
  const auto results = run_children({{.words = {"sh", "-c", "sleep 1000 & sleep 1000"}}, {.words = {"false"}}}, 600);
  EXPECT_EQ(results[1].status, 1);
  EXPECT_EQ(results[0].status, 128 + 9);
  EXPECT_FALSE(results[0].timed_out);
  const ChildResult late = run_children({{.words = {"sleep", "1000"}}}, 0.1)[0];
  EXPECT_TRUE(late.timed_out);
  EXPECT_EQ(late.reason(), "it took too long");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(300));
}

TEST(Selftest, NoticesRowsThatAreOthers) {
  const WorkloadShape shape{.ranks = 1, .tokens = 5, .hidden = 128, .topk = 2, .experts = 4};
  WorkloadShape other = shape;
  other.topk = 3;
  const SelftestTruth truth(shape);
  const SelftestTruth wrong(other);
  const auto bootstrap = make_thread_bootstraps(1).front();
  const auto executor = make_executor(Device::Kind::cpu, 0);
  SelftestRank rank(shape, truth, bootstrap, executor);
  for (const SelftestCase& one : selftest_cases(1)) EXPECT_NO_THROW(rank.run(one)) << one.name();
  rank.destroy();
  SelftestRank mistaken(shape, wrong, bootstrap, executor);
  EXPECT_NE(error_in([&] { mistaken.run({.topk = true}); }).find("selections"), std::string::npos);
  mistaken.destroy();
}

TEST(Selftest, HasUpstreamsCases) {
  EXPECT_EQ(selftest_cases(1).size(), 24u);
  EXPECT_EQ(selftest_cases(2).size(), 32u);
  EXPECT_EQ(selftest_cases(2).front().name(), "Running with BF16, without top-k (async=False, previous=False)");
  EXPECT_EQ(selftest_cases(2).back().name(), "Running with FP8, with top-k (async=True, previous=True)");
}

}  // namespace
}  // namespace deep_ep::tools
