// The NIC test on wires that are well and on wires with one mistake each: each mistake must give a line that says so.
#include "simulation/nic_test/nic_test.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/rdma/local/local_ends.hpp"
#include "csrc/rdma/ring/wire.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/log.hpp"
#include "simulation/kernels/nic_test.hpp"
#include "simulation/nic_test/judge.hpp"
#include "tests/cluster/processes.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::test {
namespace {

/// One kind of mistake, as a NIC might make it.
enum class Mistake {
  none,
  drops_a_write,      ///< but says that it is complete
  drops_an_addition,  ///< to the counter, likewise
  flag_before_data,   ///< additions overtake the writes before them
  never_completes,    ///< anything
};

/// Between a handler and a good wire.
class FaultyWire final : public rdma::Wire {
 public:
  FaultyWire(rdma::Wire& wire, Mistake mistake) : wire_(wire), mistake_(mistake) {}

  void post(std::size_t ring, std::span<const rdma::Operation> operations) override {
    for (const rdma::Operation& operation : operations) post(ring, operation);
  }

  std::size_t poll(std::span<rdma::WireCompletion> completions) override {
    if (mistake_ == Mistake::never_completes) return 0;
    // Nothing is complete before it is written; a sender waits for that, a receiver only for the flag.
    constexpr auto kLate = std::chrono::milliseconds(100);
    if (!late_.empty() && std::chrono::steady_clock::now() - since_ < kLate) return 0;
    write_late();
    const std::size_t count = wire_.poll(completions);
    // What was written late is complete behind what came after it, which a NIC would not say.
    if (mistake_ == Mistake::flag_before_data) std::sort(completions.begin(), completions.begin() + count, in_order);
    return count;
  }

 private:
  void post(std::size_t ring, rdma::Operation operation) {
    const bool writes = operation.opcode == device::rdma::kOpcodeWrite;
    const bool adds =
        operation.opcode == device::rdma::kOpcodeFetchAdd && operation.remote.address == nic_test::kCounters;
    const bool sender = operation.queue_pair % 2 == 1;  // numbers begin at 1
    if (!sender) write_late();                          // it has looked, and answers
    if (mistake_ == Mistake::flag_before_data && writes) {
      if (late_.empty()) since_ = std::chrono::steady_clock::now();
      late_.emplace_back(ring, operation);
      return;
    }
    if (sender &&
        ((mistake_ == Mistake::drops_a_write && writes) || (mistake_ == Mistake::drops_an_addition && adds))) {
      if (++seen_ == 3) {
        operation.opcode = device::rdma::kOpcodeWrite;
        operation.length = 0;
      }
    }
    wire_.post(ring, {&operation, 1});
  }

  static bool in_order(const rdma::WireCompletion& a, const rdma::WireCompletion& b) {
    return std::tie(a.ring, a.index) < std::tie(b.ring, b.index);
  }

  void write_late() {
    for (const auto& [ring, operation] : std::exchange(late_, {})) wire_.post(ring, {&operation, 1});
  }

  rdma::Wire& wire_;
  Mistake mistake_;
  int seen_ = 0;
  std::vector<std::pair<std::size_t, rdma::Operation>> late_;
  std::chrono::steady_clock::time_point since_;
};

using rdma::nic_test::Line;
using rdma::nic_test::Lines;
using rdma::nic_test::MakeEndsOn;
using rdma::nic_test::Outcome;

MakeEndsOn with_mistake(const std::shared_ptr<Executor>& executor, Mistake mistake) {
  return [=](rdma::NicHandler, const SymmetricHeap& heap, const rdma::ConnectionOptions& options) {
    const auto wrap = [=](rdma::Wire& wire) { return std::make_unique<FaultyWire>(wire, mistake); };
    return rdma::make_local_ends(executor, heap, options, {.wrap = wrap});
  };
}

/// One for the handler `gpu`, which is tried first, and one for every other.
MakeEndsOn first_and_others(MakeEndsOn first, MakeEndsOn others) {
  return [=](rdma::NicHandler handler, const SymmetricHeap& heap, const rdma::ConnectionOptions& options) {
    return (handler == rdma::NicHandler::gpu ? first : others)(handler, heap, options);
  };
}

MakeEndsOn throwing(const std::string& text) {
  return [text](rdma::NicHandler, const SymmetricHeap&, const rdma::ConnectionOptions&) -> std::unique_ptr<rdma::Ends> {
    throw SystemError(text);
  };
}

rdma::nic_test::Subject subject_of(Mistake mistake) {
  const std::shared_ptr<Executor> executor = make_host_executor();
  return {.name = "faulty",
          .executor = executor,
          .make = with_mistake(executor, mistake),
          .others = {},
          .no_others = "none"};
}

/// Failures on purpose need not be in the log.
class NicTest : public testing::Test {
 protected:
  NicTest() {
    set_log_sink([](LogLevel, std::string_view) {}, LogLevel::error);
  }
  ~NicTest() override { set_log_sink({}); }

  rdma::nic_test::Limits limits_{.wait_s = patience(), .entries = 2000, .entries_s = scaled(20), .phase_s = 0.02};

  Lines run(const rdma::nic_test::Subject& subject, double seconds = 0) const {
    rdma::nic_test::Limits limits = limits_;
    limits.seconds = seconds;
    return rdma::nic_test::test_nic(*make_thread_bootstraps(1).front(), subject, limits);
  }
  static std::string outcomes(const Lines& lines) {
    std::string text;
    for (const Line& line : lines) {
      if (!text.empty()) text += ' ';
      text += line.check + (line.outcome == Outcome::pass ? "+" : line.outcome == Outcome::fail ? "-" : "?");
    }
    return text;
  }
  static const Line& line_of(const Lines& lines, const std::string& check) {
    return *std::find_if(lines.begin(), lines.end(), [&](const Line& line) { return line.check == check; });
  }
  /// The check must fail, say `found`, what it means and what to do.
  void expect_failure(Mistake mistake, const std::string& check, const std::string& found, const std::string& meaning) {
    const Lines lines = run(subject_of(mistake));
    const Line& line = line_of(lines, check);
    EXPECT_EQ(line.outcome, Outcome::fail) << outcomes(lines);
    EXPECT_TRUE(contains(line.found, found)) << line.found;
    EXPECT_TRUE(contains(line.meaning, meaning)) << line.meaning;
    EXPECT_FALSE(line.action.empty());
  }
};

TEST_F(NicTest, AnAdditionThatIsLost) {
  expect_failure(Mistake::drops_an_addition, "atomics", "additions", "additions get lost");
}

TEST_F(NicTest, AFlagBeforeItsData) {
  if (under_thread_sanitizer()) GTEST_SKIP() << "the mistake is a data race";
  expect_failure(Mistake::flag_before_data, "litmus",
                 "the flag was seen before the data: ", "signals overtake what they announce");
  const Lines lines = run(subject_of(Mistake::flag_before_data));
  EXPECT_EQ(line_of(lines, "entries").outcome, Outcome::skip) << line_of(lines, "entries").found;
}

TEST_F(NicTest, NoCompletions) {
  limits_.wait_s = short_deadline() / 4;
  rdma::nic_test::Subject subject = subject_of(Mistake::never_completes);
  subject.make = first_and_others(subject.make, with_mistake(subject.executor, Mistake::none));
  subject.others = {rdma::NicHandler::cpu};
  const Lines lines = run(subject);
  // Who does not complete one entry need not be waited for again; the other ways say what does work.
  EXPECT_EQ(outcomes(lines), "queue_pairs+ entries- litmus? atomics? bandwidth? wrong_key? way+");
  EXPECT_TRUE(contains(line_of(lines, "entries").found, "no completion of entry")) << line_of(lines, "entries").found;
  EXPECT_TRUE(contains(line_of(lines, "entries").action, "DEEP_EP_NIC_HANDLER=cpu"));
}

TEST_F(NicTest, NothingIsBegunWhenTheTimeIsOver) {
  const Lines lines = run(subject_of(Mistake::none), 1e-6);
  EXPECT_EQ(outcomes(lines), "queue_pairs? way?");
  EXPECT_TRUE(contains(lines[0].found, "no time was left of"));
}

TEST_F(NicTest, TheTimeIsOverWhenQueuePairsAreMade) {
  const double seconds = scaled(1);
  rdma::nic_test::Subject subject = subject_of(Mistake::none);
  subject.make = [=, make = subject.make](auto handler, const auto& heap, const auto& options) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    return make(handler, heap, options);
  };
  const Lines lines = run(subject, seconds);
  EXPECT_EQ(outcomes(lines), "queue_pairs+ entries? litmus? atomics? bandwidth? wrong_key? way?");
  for (const char* check : {"entries", "litmus", "wrong_key"}) {
    EXPECT_TRUE(contains(line_of(lines, check).found, "no time was left of")) << line_of(lines, check).found;
  }
}

TEST_F(NicTest, OtherWaysToDriveTheNic) {
  rdma::nic_test::Subject subject = subject_of(Mistake::none);
  const MakeEndsOn refused = throwing("ibv_reg_mr: no memory");
  const MakeEndsOn bad = with_mistake(subject.executor, Mistake::drops_a_write);
  subject.make = first_and_others(subject.make, [=](rdma::NicHandler handler, const auto& heap, const auto& options) {
    return (handler == rdma::NicHandler::doorbell ? refused : bad)(handler, heap, options);
  });
  subject.others = {rdma::NicHandler::doorbell, rdma::NicHandler::cpu};
  const Lines lines = run(subject);
  EXPECT_TRUE(contains(outcomes(lines), "wrong_key+ way- way-")) << outcomes(lines);
  EXPECT_EQ((lines.end() - 2)->found, "handler doorbell: ibv_reg_mr: no memory");
}

TEST_F(NicTest, AHandlerThatIsNotTheOneWanted) {
  rdma::nic_test::Subject subject = subject_of(Mistake::none);
  subject.wants_gpu_handler = true;
  const Lines lines = run(subject);
  EXPECT_TRUE(contains(outcomes(lines), "queue_pairs+ handler- entries? litmus+")) << outcomes(lines);
  EXPECT_TRUE(contains(line_of(lines, "handler").found, "kernels cannot ring this NIC"));
}

TEST_F(NicTest, ADeviceThatRefusesIsALineToo) {
  rdma::nic_test::Subject subject = subject_of(Mistake::none);
  subject.handler = rdma::NicHandler::gpu;
  subject.make = first_and_others(throwing("ibv_create_qp: no memory"), subject.make);
  subject.others = {rdma::NicHandler::cpu};
  const Lines lines = run(subject);
  EXPECT_EQ(outcomes(lines), "queue_pairs- way+") << "another way may work, and a run may take it";
  EXPECT_EQ(lines[0].found, "ibv_create_qp: no memory");
}

/// Both sides, each with a wire of its own; [side].
std::vector<Lines> run_both(const rdma::nic_test::Limits& limits, const std::vector<rdma::nic_test::Subject>& sides) {
  const auto bootstraps = make_thread_bootstraps(2, long_patience());
  std::vector<Lines> lines(2);
  expect_nothing_thrown(run_threads(2, [&](int rank) {
    lines[static_cast<std::size_t>(rank)] = rdma::nic_test::test_nic(*bootstraps[static_cast<std::size_t>(rank)],
                                                                     sides[static_cast<std::size_t>(rank)], limits);
  }));
  return lines;
}

TEST_F(NicTest, TheSideThatReceivesSeesWhatTheOtherOneDid) {
  const std::vector<Lines> lines = run_both(limits_, {subject_of(Mistake::drops_a_write), subject_of(Mistake::none)});
  EXPECT_EQ(line_of(lines[0], "entries").outcome, Outcome::fail) << "it has seen nothing, but is told";
  EXPECT_TRUE(contains(line_of(lines[0], "entries").found, "all data is right")) << line_of(lines[0], "entries").found;
  EXPECT_TRUE(contains(line_of(lines[0], "entries").found, "; but on the other machine: "));
  EXPECT_EQ(line_of(lines[1], "entries").outcome, Outcome::fail);
  EXPECT_TRUE(contains(line_of(lines[1], "entries").found, "wrong, first in round 1 that of write 1: expected "));
}

TEST(NicTestLines, AWriteByAWrongKeyMustFailAsItShould) {
  rdma::nic_test::Run run;
  EXPECT_EQ(judge_wrong_key(run).found, "a write by a wrong key succeeded");
  run.fault.emplace().kind = FaultKind::rdma_failed;
  run.fault->field = RdmaFailure{.syndrome = 0x15}.packed();
  EXPECT_TRUE(contains(judge_wrong_key(run).found, "fails with syndrome 0x15"));
}

/// 400 Gbit/s are 50 GB/s.
TEST(NicTestLines, ALowRateNamesTheLikelyCause) {
  const auto judged = [](double gb_per_s, rdma::nic_test::Link link) {
    rdma::nic_test::Run run;
    run.bytes = static_cast<std::uint64_t>(gb_per_s * 1e9);
    run.seconds = 1;
    link.gbps = 400;
    return rdma::nic_test::judge_bandwidth({run}, link);
  };
  const rdma::nic_test::Link good{
      .is_judged = true, .pcie_gbps = 512, .pcie_best_gbps = 512, .interface_mtu = 9000, .virtual_machine = true};
  EXPECT_EQ(judged(41, good).outcome, Outcome::pass);
  EXPECT_EQ(judged(39, {}).outcome, Outcome::pass) << "a CPU thread posts: its rate is not the link's";
  EXPECT_EQ(judged(39, good).outcome, Outcome::fail);
  EXPECT_TRUE(contains(judged(39, good).action, "DEEP_EP_RDMA_RELAXED_ORDERING=1"));
  rdma::nic_test::Link link = good;
  link.relaxed_ordering = true;
  EXPECT_TRUE(contains(judged(39, link).action, "ATS_ENABLED=1"));
  link.virtual_machine = false;
  EXPECT_TRUE(contains(judged(39, link).action, "ACS"));
  link.interface_mtu = 1500;
  EXPECT_TRUE(contains(judged(39, link).action, "the MTU of the interface is 1500"));
  link.pcie_gbps = 256;
  EXPECT_TRUE(contains(judged(39, link).action, "PCIe runs at 256 of 512 Gbit/s"));
  link.pcie_best_gbps = 256;
  EXPECT_TRUE(contains(judged(39, link).action, "PCIe carries 256 Gbit/s, less than the port"));
}

}  // namespace
}  // namespace deep_ep::test
