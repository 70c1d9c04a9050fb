// `deep_ep doctor --explain`: messages of others and of the library, as users paste them.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "tools/doctor/explain/explain.hpp"

namespace deep_ep::tools {
namespace {

std::string first(std::string_view text) {
  const auto explanations = explain(text);
  return explanations.empty() ? "nothing" : explanations[0].origin + ": " + explanations[0].pattern;
}

TEST(Explain, MessagesOfOthersAsTheyAreSeen) {
  EXPECT_EQ(first("NCCL WARN NET/Plugin: Failed to initialize any NET plugin"),
            "NCCL: Failed to initialize any NET plugin");
  EXPECT_EQ(first("ImportError: /usr/lib/x86_64-linux-gnu/libmlx5.so.1: version `IBVERBS_PRIVATE_34' not found "
                  "(required by /usr/local/nvidia/lib64/libmlx5.so)"),
            "libibverbs: version 'IBVERBS_PRIVATE_...' not found");
  EXPECT_EQ(first("RuntimeError: DeepEP error: timeout (dispatch CPU)"), "DeepEP: timeout (dispatch CPU)");
  EXPECT_EQ(first("Global rank: 3, num_recv_tokens: -1, moe_recv_expert_counter[0]: -1"),
            "DeepEP: moe_recv_expert_counter");
  EXPECT_EQ(first("NET/IB : Got completion from peer 10.0.0.3<41244> with status=12 opcode=0 len=0 vendor err 129"),
            "NCCL: Got completion from peer ... status=12");
  EXPECT_EQ(first("NVRM: Xid (PCI:0000:18:00): 79, pid=1234, GPU has fallen off the bus."),
            "NVIDIA driver: Xid (PCI:...): 79");
}

TEST(Explain, ALongListIsCountedAndJsonHasAllOfIt) {
  const std::string text =
      "ncclRemoteError\nunhandled system error\nunhandled cuda error\nNo IB devices found\nconnect EPS failed";
  const auto all = explain(text);
  EXPECT_EQ(all.size(), 5u);
  EXPECT_NE(to_text(all).find("2 more messages are known"), std::string::npos) << to_text(all);
  EXPECT_EQ(to_json(text, all).at("explanations").size(), 5u);
}

TEST(Explain, WhiteSpaceCaseAndQuotesDoNotMatter) {
  EXPECT_EQ(first("failed to  initialize\n\tANY net plugin"), "NCCL: Failed to initialize any NET plugin");
  EXPECT_EQ(first("version \"IBVERBS_PRIVATE_58\" not found"), "libibverbs: version 'IBVERBS_PRIVATE_...' not found");
}

TEST(Explain, UnknownTextsAreNotExplained) {
  for (const char* text :
       {"hello", "Segmentation fault (core dumped)", "the lamp is green", "...", "rank 3 (host b): x"}) {
    EXPECT_TRUE(explain(text).empty()) << text << " -> " << first(text);
  }
  const std::string none = to_text(std::vector<Explanation>{});
  EXPECT_NE(none.find("Nothing is known"), std::string::npos);
  EXPECT_NE(none.find("--bundle"), std::string::npos);
}

// A user pastes a text that the pages quote, with something in the place of "...".
TEST(Explain, KnowsEveryMessageOfThePages) {
  std::size_t own = 0;
  std::size_t others = 0;
  std::set<std::string> patterns;
  for (const KnownError& error : known_errors()) {
    const bool is_own = error.origin == "deep_ep";
    EXPECT_TRUE(!error.cause.empty() && !error.remedy.empty() && !error.origin.empty()) << error.patterns[0];
    // A row is read alone.
    EXPECT_FALSE(error.cause.starts_with("as above") || error.remedy.starts_with("as above")) << error.patterns[0];
    EXPECT_FALSE(error.cause.starts_with("the same in") || error.cause.starts_with("the same:")) << error.patterns[0];
    EXPECT_EQ(error.cause.find("]("), std::string::npos) << error.cause;
    for (const std::string& pattern : error.patterns) {
      ++(is_own ? own : others);
      EXPECT_GE(weight_of(pattern), is_own ? kLeastWeight : 6u) << pattern;
      EXPECT_TRUE(is_own || patterns.insert(pattern).second) << pattern << " is there twice";
      std::string text = "deep_ep: " + pattern;
      for (std::size_t at = text.find("..."); at != std::string::npos; at = text.find("...", at))
        text.replace(at, 3, "17");
      EXPECT_TRUE(is_like(normal(text), pattern)) << text;
      EXPECT_FALSE(explain(text).empty()) << text;
    }
  }
  EXPECT_GT(own, 200u);
  EXPECT_GT(others, 100u);
}

}  // namespace
}  // namespace deep_ep::tools
