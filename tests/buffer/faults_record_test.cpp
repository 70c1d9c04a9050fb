// Faults on record, as the host raises them.
#include <gtest/gtest.h>

#include "csrc/buffer/faults.hpp"
#include "csrc/executor/own_stream.hpp"
#include "deep_ep/error.hpp"
#include "kernels/rdma/params.hpp"
#include "tests/memory/fake_executor.hpp"

namespace deep_ep {
namespace {

void put_on_record(FaultRecord& record, FaultKind kind, Wanted wanted, int peer) {
  record.kind = kind;
  record.wanted = wanted;
  record.peer = peer;
  record.expected = 5;
  record.claimed = record.written = 1;
}

/// The data waited for may depend on data that this rank sent, and that its NIC lost. With masking calls go on
/// without the peer, so that says nothing.
TEST(FaultsRecord, AFailedQueuePairExplainsAWaitInVain) {
  for (const bool masking : {false, true}) {
    const auto executor = make_host_executor();
    const OwnStream stream(*executor);
    const CallContext calls{executor, stream.get(), std::make_shared<Arena>(executor, test::fake_memory(), 1 << 20)};
    const auto words = std::make_shared<ControlWords>();
    Faults faults(calls, 0, 4, 1.0, words, nullptr, masking);
    words->failed[2] = RdmaFailure{.syndrome = 0x13, .opcode = device::rdma::kOpcodeWrite}.packed() + 1;
    const std::string cause = "rank 0: RDMA write to rank 2 failed: syndrome 0x13, remote access error";
    for (const int rank : {0, 2}) EXPECT_EQ(faults.describe_failure(rank).find(cause), 0u) << rank;
    for (const int rank : {1, 3}) EXPECT_EQ(faults.describe_failure(rank), "");
    put_on_record(*faults.wait_context().fault, FaultKind::timeout, Wanted::low_latency_combine_rows, 3);
    for (int times = 0; times < 2; ++times) {
      try {
        faults.raise();
        ADD_FAILURE() << "nothing was raised";
      } catch (const Error& error) {
        EXPECT_EQ(dynamic_cast<const SystemError*>(&error) != nullptr, !masking) << error.what();
        const std::string wait = "rank 0 waited 1 s for rank 3 without seeing a row (low-latency combine)";
        EXPECT_EQ(std::string(error.what()).find(masking ? wait : cause), 0u) << error.what();
        EXPECT_NE(std::string(error.what()).find(wait), std::string::npos) << error.what();
      }
    }
  }
}

}  // namespace
}  // namespace deep_ep
