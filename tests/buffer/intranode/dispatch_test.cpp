// What travels in a row: payloads of every type and size, scales of every stride, top-k of every width.
#include "tests/cluster/fixture.hpp"

namespace deep_ep::test {
namespace {

class DispatchTest : public ClusterTest {};
DEEP_EP_ON_THREADS(DispatchTest);

TEST_P(DispatchTest, EveryElementType) {
  std::vector<Shape> shapes;
  for (const DType dtype : {DType::bfloat16, DType::float16, DType::float32, DType::uint8, DType::int32, DType::int64,
                            DType::float8_e4m3, DType::float8_e5m2, DType::boolean}) {
    shapes.push_back({.tokens = {17, 9}, .dtype = dtype, .hidden = 48, .seed = shapes.size() + 1});
  }
  run_rounds(cluster(2), shapes);
}

TEST_P(DispatchTest, RowsOf16BytesTo32KiB) {
  std::vector<Shape> shapes;
  for (const std::int64_t bytes :
       ends_of<std::int64_t>({16, 32, 112, 128, 144, 1040, 4096, 7168, 14336, 16400, 32752, 32768})) {
    shapes.push_back({.tokens = {7, 5},
                      .topk = 2,
                      .dtype = DType::uint8,
                      .hidden = bytes,
                      .combine_hidden = bytes / 2,
                      .seed = shapes.size() + 1});
  }
  run_rounds(cluster(2), shapes);
}

/// Each has scales of its own, up to numbers that small tests never reach.
TEST_P(DispatchTest, ThousandsOfTokens) {
  const std::int64_t less = under_thread_sanitizer() ? 2 : 1;  // still several turns of a block
  const std::vector<Shape> shapes = {
      {.tokens = {2100 / less, 40}, .topk = 1, .dtype = DType::uint8, .hidden = 16, .scales = 2},
      {.tokens = {1100 / less, 0}, .dtype = DType::uint8, .hidden = 16, .scales = 130}};
  run_rounds(cluster(2), shapes);
}

TEST_P(DispatchTest, EveryRoutingAndTokenCount) {
  std::vector<Shape> shapes;
  for (const auto routing : oracle::kRoutings) {
    for (const auto counts : oracle::kTokenCounts) {
      const std::uint64_t seed = shapes.size() + 1;
      shapes.push_back({.tokens = oracle::make_token_counts(counts, 3, 14, seed), .routing = routing, .seed = seed});
    }
  }
  run_rounds(cluster(3), shapes);
}

TEST_P(DispatchTest, MembershipAloneDecidesWhereRowsGo) {
  const Shape shape{.tokens = {6, 4}};
  // Not what the top-k says: everything to rank 1, and one token to both.
  const Case one = make_case(shape, {{0, 1, 0, 1, 1, 1, 0, 1, 0, 1, 0, 0}, {0, 1, 0, 1, 0, 1, 0, 1}});
  run_with_buffers(cluster(2), [&](Rank& rank, Buffer& buffer) {
    run_round(rank, buffer, one, {.num_sms = 0, .use_layout_call = false});
  });
}

TEST_P(DispatchTest, ExpertAlignment) {
  std::vector<Shape> shapes;
  for (const int alignment : {1, 2, 3, 16, 128}) {
    for (const auto routing : {oracle::Routing::uniform, oracle::Routing::one_hot_expert}) {
      shapes.push_back({.tokens = {23, 30}, .local_experts = 5, .topk = 3, .routing = routing, .alignment = alignment});
    }
  }
  run_rounds(cluster(2), shapes);
}

}  // namespace
}  // namespace deep_ep::test
