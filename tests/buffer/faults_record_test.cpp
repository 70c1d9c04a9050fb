// Faults on record, as the host raises them: those of calls and those of kernels that run beside calls.
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

/// What a mismatch that ends only its call leaves behind: the next one can be put on record.
TEST(FaultsRecord, OfAKernelBesideACallThatRaises) {
  const auto executor = make_host_executor();
  const OwnStream stream(*executor);
  const CallContext calls(executor, stream.get(),
                          std::make_shared<Arena>(executor, std::make_shared<test::FakeHeap>(1 << 20), 0, 1 << 20));
  Faults faults(calls, executor, 0, 4, 60.0);
  FaultRecord& of_call = *faults.wait_context().fault;
  faults.raise();
  EXPECT_FALSE(faults.met() || faults.broken());

  put_on_record(of_call, FaultKind::mismatch, Wanted::counts, 1);
  EXPECT_TRUE(faults.met() && !faults.broken());
  put_on_record(*faults.record_beside(), FaultKind::timeout, Wanted::low_latency_dispatch_rows, 3);
  EXPECT_TRUE(faults.broken());
  EXPECT_THROW(faults.raise(), RankMismatch) << "that call's";
  EXPECT_FALSE(of_call.written);
  ASSERT_TRUE(faults.met()) << "still on record";
  for (int times = 0; times < 2; ++times) {
    try {
      faults.raise();
      ADD_FAILURE() << "nothing was raised";
    } catch (const TimeoutError& error) {
      EXPECT_NE(std::string(error.what()).find("rank 3"), std::string::npos) << error.what();
    }
  }
}

/// A relay waits for what the rank that it names sends itself, a call perhaps for what that one hands on; and whatever
/// else a call has met explains why a relay waits in vain.
TEST(FaultsRecord, OfTwoTheOneThatNamesTheCause) {
  for (const FaultKind of_call : {FaultKind::timeout, FaultKind::mismatch, FaultKind::rdma_failed}) {
    const auto executor = make_host_executor();
    const OwnStream stream(*executor);
    const CallContext calls(executor, stream.get(),
                            std::make_shared<Arena>(executor, std::make_shared<test::FakeHeap>(1 << 20), 0, 1 << 20));
    Faults faults(calls, executor, 0, 4, 60.0);
    put_on_record(*faults.wait_context().fault, of_call, Wanted::low_latency_combine_rows, 1);
    put_on_record(*faults.record_beside(), FaultKind::timeout, Wanted::low_latency_combine_rows, 3);
    const std::string named = of_call == FaultKind::timeout ? "rank 3" : "rank 1";
    try {
      faults.raise();
      ADD_FAILURE() << "nothing was raised";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
    }
  }
}

/// The data waited for may depend on data that this rank sent, and that its NIC lost. With masking calls go on
/// without the peer, so that says nothing.
TEST(FaultsRecord, AFailedQueuePairExplainsAWaitInVain) {
  for (const bool masking : {false, true}) {
    const auto executor = make_host_executor();
    const OwnStream stream(*executor);
    const CallContext calls(executor, stream.get(),
                            std::make_shared<Arena>(executor, std::make_shared<test::FakeHeap>(1 << 20), 0, 1 << 20));
    Faults faults(calls, executor, 0, 4, 1.0);
    const auto words = std::make_shared<ControlWords>();
    faults.obey(executor, nullptr, words, masking);
    words->failed[2] = RdmaFailure{.syndrome = 0x13, .opcode = device::rdma::kOpcodeWrite}.packed() + 1;
    put_on_record(*faults.wait_context().fault, FaultKind::timeout, Wanted::low_latency_combine_rows, 3);
    for (int times = 0; times < 2; ++times) {
      try {
        faults.raise();
        ADD_FAILURE() << "nothing was raised";
      } catch (const Error& error) {
        EXPECT_EQ(dynamic_cast<const SystemError*>(&error) != nullptr, !masking) << error.what();
        const std::string wait = "rank 0 waited 1 s for rank 3 without seeing a row (low-latency combine)";
        const std::string cause = "rank 0: RDMA write to rank 2 failed: syndrome 0x13, remote access error";
        EXPECT_EQ(std::string(error.what()).find(masking ? wait : cause), 0u) << error.what();
        EXPECT_NE(std::string(error.what()).find(wait), std::string::npos) << error.what();
      }
    }
  }
}

}  // namespace
}  // namespace deep_ep
