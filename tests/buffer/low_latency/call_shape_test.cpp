// Which argument of a low-latency dispatch two ranks differ in.
#include "csrc/buffer/low_latency/call_shape.hpp"

#include <gtest/gtest.h>

#include <string>

namespace deep_ep {
namespace {

using Shape = LowLatencyCallShape;
constexpr Shape kOwn{{128, 7168, 32, 1, 8, 0, 0, 0}};

std::string difference(int field, std::int64_t value) {
  LowLatencyCallShapes shapes;
  shapes.note(kOwn);
  shapes.note({{1, 128, 1, 0, 1, 0, 0, 0}});
  Shape theirs = kOwn;
  theirs.fields[static_cast<std::size_t>(field)] = value;
  return shapes.difference(kOwn.hash(), theirs.hash(), 2, 5, 8);
}

TEST(LowLatencyCallShape, TheOneThatDiffersIsNamedWithBothValues) {
  const std::string equal = "; it must be equal on all ranks", call = "low_latency_dispatch: ";
  EXPECT_EQ(difference(Shape::max_tokens, 65000), call + "max_tokens is 128 on rank 2 but 65000 on rank 5" + equal);
  EXPECT_EQ(difference(Shape::hidden, 2560), call + "hidden is 7168 on rank 2 but 2560 on rank 5" + equal);
  EXPECT_EQ(difference(Shape::local_experts, 33), call + "num_experts is 256 on rank 2 but 264 on rank 5" + equal);
  EXPECT_EQ(difference(Shape::format, 3), call + "rows' format is fp8 on rank 2 but fp8_ue8m0 on rank 5" + equal);
  EXPECT_EQ(difference(Shape::topk, 1), call + "top-k is 8 on rank 2 but 1 on rank 5" + equal);
  EXPECT_EQ(difference(Shape::rail_width, 4),
            call + "ranks of a rail is 0 (return_recv_hook is given) on rank 2 but 4 on rank 5" + equal);
  EXPECT_EQ(difference(Shape::weights, 1), call + "combine_weights is not given on rank 2 but given on rank 5" + equal);
  EXPECT_EQ(difference(Shape::too_many_tokens, 1),
            call + "rank 5 has more tokens than max_tokens, which its own error says");
}

TEST(LowLatencyCallShape, SeveralDifferencesAndForgottenCallsAreNotGuessedAt) {
  LowLatencyCallShapes shapes;
  shapes.note(kOwn);
  Shape theirs = kOwn;
  theirs.fields[Shape::topk] = 4, theirs.fields[Shape::hidden] = 128;
  EXPECT_EQ(shapes.difference(kOwn.hash(), theirs.hash(), 2, 5, 8), "");
  EXPECT_EQ(shapes.difference(theirs.hash(), kOwn.hash(), 2, 5, 8), "");
}

}  // namespace
}  // namespace deep_ep
