// Who is named in the text of a fault, and with which of its numbers.
#include "csrc/buffer/faults.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace deep_ep {
namespace {

constexpr int kSelf = 2;

FaultRecord record(FaultKind kind, Wanted wanted, int field = 0) {
  FaultRecord fault{};
  fault.kind = kind;
  fault.wanted = wanted;
  fault.peer = 5;
  fault.field = field;
  fault.expected = 17;
  fault.seen = 13;
  return fault;
}

std::string text_of(FaultKind kind, Wanted wanted, int field = 0) {
  return describe_fault(record(kind, wanted, field), kSelf, 1.5);
}

TEST(FaultTexts, ATimeoutNamesWhoWaitedAndForWhom) {
  const std::string waited = "rank 2 waited 1.5 s for rank 5 without seeing ";
  const std::string words = " (signal at 13, expected 17). The ranks no longer agree: destroy the buffer";
  EXPECT_EQ(text_of(FaultKind::timeout, Wanted::combine_rows), waited + "a pushed row (combine kernel)" + words);
  EXPECT_EQ(text_of(FaultKind::timeout, Wanted::counts), waited + "its token counts (dispatch, notify kernel)" + words);
}

TEST(FaultTexts, ATimeoutNamesWhomARelayWaitsFor) {
  const FaultRecord fault = record(FaultKind::timeout, Wanted::combine_rows);
  EXPECT_EQ(describe_fault(fault, kSelf, 1.5, 7),
            "rank 2 waited 1.5 s for rank 7, which rank 5 waits for, too, without seeing a pushed row (combine kernel) "
            "(signal at 13, expected 17). The ranks no longer agree: destroy the buffer");
  EXPECT_EQ(describe_fault(fault, kSelf, 1.5, 5), describe_fault(fault, kSelf, 1.5));
}

TEST(FaultTexts, MaskingSaysWhy) {
  using control::LostWhy;
  constexpr auto kRow = static_cast<std::uint32_t>(Wanted::low_latency_combine_rows);
  EXPECT_EQ(describe_masking({.rank = 5, .why = LostWhy::gone}, "the process of rank 5 has ended (process 77 on a)"),
            "rank 5 is masked: the process of rank 5 has ended (process 77 on a)");
  EXPECT_EQ(describe_masking({.rank = 5, .why = LostWhy::silent, .by = 7, .wanted = kRow, .waited_s = 1.52}, ""),
            "rank 5 is masked: rank 7 waited 1.52 s for it without seeing a row (low-latency combine)");
  EXPECT_EQ(describe_masking({.rank = 5, .why = LostWhy::failed, .by = 7}, ""),
            "rank 5 is masked: RDMA operations of rank 7 to it failed");
  EXPECT_EQ(describe_masking({.rank = 5, .why = LostWhy::ended}, ""),
            "rank 5 is masked: it has ended a low-latency call, and its own error says why");
}

TEST(FaultTexts, AMaskedRankIsToldHowItComesBack) {
  using control::LostRank;
  using control::LostWhy;
  const std::string comes_back = ". It comes back with low_latency_resume, which all ranks call";
  constexpr auto kCounts = static_cast<std::uint32_t>(Wanted::low_latency_dispatch_counts);
  const auto of = [](const LostRank& own) {
    const std::vector<LostRank> lost = {{.rank = 4, .why = LostWhy::gone, .by = 0}, own};
    return describe_given_up(lost, kSelf);
  };
  EXPECT_EQ(
      of({.rank = kSelf, .why = LostWhy::silent, .by = 5, .wanted = kCounts, .waited_s = 1.5}),
      "rank 2 is masked: rank 5 waited 1.5 s for it without seeing its counts (low-latency dispatch)" + comes_back);
  EXPECT_EQ(of({.rank = kSelf, .why = LostWhy::failed, .by = 5}),
            "rank 2 is masked: RDMA operations of rank 5 to it failed" + comes_back);
  EXPECT_EQ(of({.rank = kSelf, .why = LostWhy::ended}),
            "rank 2 is masked: it has ended a low-latency call, and its own error says why" + comes_back);
}

TEST(FaultTexts, AMismatchGivesEachRankItsValue) {
  EXPECT_EQ(text_of(FaultKind::mismatch, Wanted::counts, 4),
            "dispatch: number of experts is 17 on rank 2 but 13 on rank 5; it must be equal on all ranks");
  const std::string late =
      "is 17 on rank 2 but 13 on rank 5; it must be equal on all ranks. The ranks no longer agree: "
      "destroy the buffer";
  EXPECT_EQ(text_of(FaultKind::mismatch, Wanted::dispatch_addresses, 1), "dispatch: number of scales of a row " + late);
  EXPECT_EQ(text_of(FaultKind::mismatch, Wanted::combine_addresses, 2), "combine: top-k " + late);
}

TEST(FaultTexts, AMismatchOfLowLatencyDispatchesNamesOneArgumentWhereItCan) {
  const FaultRecord fault = record(FaultKind::mismatch, Wanted::low_latency_dispatch_counts);
  const std::string end = ". The ranks no longer agree: destroy the buffer";
  EXPECT_EQ(describe_mismatch(fault, kSelf, "low_latency_dispatch: top-k differs"),
            "low_latency_dispatch: top-k differs" + end);
  EXPECT_EQ(describe_mismatch(fault, kSelf, "").find("low_latency_dispatch: ranks 2 and 5 differ in one or more of "),
            0u);
}

TEST(FaultTexts, Counts) {
  EXPECT_EQ(text_of(FaultKind::overflow, Wanted::dispatch_rows),
            "rank 2 received 17 rows but num_worst_tokens leaves room for 13; the rows beyond are lost");
}

}  // namespace
}  // namespace deep_ep
