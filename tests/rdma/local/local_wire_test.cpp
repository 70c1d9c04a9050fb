// The wire between ranks of one host.
#include "csrc/rdma/local/local_wire.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::rdma {
namespace {

enum class Through { host, executor };

class LocalWireTest : public testing::TestWithParam<Through> {
 protected:
  LocalWireTest() : wire_(GetParam() == Through::host ? nullptr : make_host_executor()) {
    wire_.add_memory(1, mine_.data(), 64);
    wire_.add_memory(2, theirs_.data(), 64);
  }

  static Operation write(std::uint64_t id, std::uint64_t local, std::uint64_t remote, std::uint32_t length) {
    return {.index = id,
            .opcode = device::rdma::kOpcodeWrite,
            .queue_pair = 10,
            .signalled = true,
            .length = length,
            .local = {local, 1},
            .remote = {remote, 2}};
  }
  static Operation add(std::uint64_t id, std::uint64_t remote, std::uint64_t addend) {
    Operation operation = write(id, 56, remote, 8);
    operation.opcode = device::rdma::kOpcodeFetchAdd;
    operation.add = addend;
    return operation;
  }
  std::vector<WireCompletion> post(const std::vector<Operation>& operations) {
    for (const Operation& operation : operations) EXPECT_EQ(wire_.post(operation.queue_pair, {&operation, 1}), 1u);
    std::vector<WireCompletion> completions(16);
    completions.resize(wire_.poll(completions));
    return completions;
  }
  Syndrome result(Operation operation) {
    const auto completions = post({operation});
    return completions.empty() ? Syndrome::none : completions.front().syndrome;
  }

  alignas(8) std::vector<std::uint64_t> mine_ = std::vector<std::uint64_t>(8, 0x1111);
  std::vector<std::uint64_t> theirs_ = std::vector<std::uint64_t>(8, 0x2222);
  LocalWire wire_;
};
INSTANTIATE_TEST_SUITE_P(, LocalWireTest, testing::Values(Through::host, Through::executor),
                         [](const auto& info) { return info.param == Through::host ? "Host" : "Executor"; });

TEST_P(LocalWireTest, ChecksKeysBoundsAndAlignment) {
  struct {
    Operation operation;
    Syndrome syndrome;
  } cases[] = {
      {write(0, 57, 0, 8), Syndrome::local_protection},
      {write(0, ~std::uint64_t{0}, 0, 8), Syndrome::local_protection},
      {write(0, 0, 57, 8), Syndrome::remote_access},
      {write(0, 0, 65, 0), Syndrome::none},
      {add(0, 4, 1), Syndrome::remote_invalid_request},
      {add(0, 64, 1), Syndrome::remote_access},
      {write(0, 0, 0, 64), Syndrome::none},
  };
  std::uint32_t number = 100;
  for (auto& c : cases) {
    c.operation.queue_pair = ++number;
    EXPECT_EQ(result(c.operation), c.syndrome);
  }
  Operation unknown = write(0, 0, 0, 8);
  unknown.queue_pair = ++number;
  unknown.remote.key = 9;
  EXPECT_EQ(result(unknown), Syndrome::remote_access);
}

TEST_P(LocalWireTest, AFailureStopsItsQueuePairOnly) {
  Operation refused = write(1, 0, 64, 8), unsignalled = write(3, 0, 0, 8);
  refused.signalled = unsignalled.signalled = false;  // a failure is told all the same
  Operation other = write(1, 0, 8, 8);
  other.queue_pair = 11;
  const auto completions = post({refused, add(2, 0, 1), unsignalled, other});
  ASSERT_EQ(completions.size(), 2u);
  EXPECT_EQ(completions[0].syndrome, Syndrome::remote_access);
  EXPECT_EQ(completions[1].syndrome, Syndrome::none);
  EXPECT_EQ(theirs_[0], 0x2222u);
  EXPECT_EQ(theirs_[1], 0x1111u);
}

}  // namespace
}  // namespace deep_ep::rdma
