// What kernels are handed when the NIC does the work, and which handler that is: with a device that records what it is
// asked, so nothing is sent.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "csrc/rdma/verbs/devx/devx_queue_pair.hpp"
#include "csrc/support/deadline.hpp"
#include "deep_ep/error.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/rdma/verbs/nic_fixture.hpp"

namespace deep_ep::rdma::verbs {
namespace {

using deep_ep::test::contains;
using deep_ep::test::message_of;
using test::FakeVerbs;

constexpr int kChannels = 2;
constexpr std::uint32_t kDepth = 128;

class NicEndsTest : public test::NicFixture {
 protected:
  /// One end a channel.
  void make() {
    NicFixture::make({.peers = {1}, .channels = kChannels, .depth = kDepth, .sink = 4096});
    ends_->start();
  }
  std::string refusal() {
    return message_of<SystemError>([&] { make(); });
  }
  /// Always true where the log goes elsewhere, or is turned down.
  static testing::AssertionResult warned(const std::string& said, const std::string& text) {
    if (std::getenv("DEEP_EP_LOG") != nullptr || std::getenv("DEEP_EP_LOG_FILE") != nullptr) {
      return testing::AssertionSuccess();
    }
    return contains(said, text);
  }
  const RdmaQueuePair& peer(int channel) const { return table_[static_cast<std::size_t>(channel)]; }
  /// What all handlers give.
  void expect_params(int channel, std::uint32_t first_number) const {
    const RdmaQueuePair& params = peer(channel);
    EXPECT_EQ(params.number, first_number + static_cast<std::uint32_t>(channel));
    EXPECT_EQ(params.depth, kDepth);
    EXPECT_EQ(params.batch, 64u);
    EXPECT_EQ(params.peer, 1);
    EXPECT_EQ(params.local_key, 0x100u);
    EXPECT_EQ(params.remote_key, 0x200u);
    EXPECT_EQ(params.signal_key, 0x200u);
    EXPECT_EQ(params.sink.address, 4096u);
    EXPECT_EQ(params.sink.key, params.local_key);
  }
  const FakeVerbs::Registered& registered(std::size_t i) const { return fake_.registered.at(i); }
};

constexpr unsigned kStrict = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

TEST_F(NicEndsTest, HandlerCpu) {
  handler_ = NicHandler::cpu;
  nic_.gpu.reset();
  make();
  EXPECT_EQ(ends_->describe(), "handler cpu, wire verbs, NIC fake_0:1, heap registered as host memory");
  // The heap from address 0, strictly ordered, and nothing else.
  EXPECT_EQ(registered(0).address, heap_->local());
  EXPECT_EQ(registered(0).bytes, test::kHeapBytes);
  EXPECT_EQ(registered(0).first_address, 0u);
  EXPECT_EQ(registered(0).access, kStrict);
  EXPECT_EQ(fake_.registered.size(), 1u);
  for (int channel = 0; channel < kChannels; ++channel) {
    EXPECT_EQ(peer(channel).doorbell_record, nullptr);
    expect_params(channel, 0x11);
  }
  // Each is connected to the one of the same channel, whose number is the same in the mirror.
  std::vector<std::uint32_t> connected_to;
  for (const auto& change : fake_.state_changes) {
    if (change.attributes.qp_state == IBV_QPS_RTR) connected_to.push_back(change.attributes.dest_qp_num);
  }
  EXPECT_EQ(connected_to, (std::vector<std::uint32_t>{0x11, 0x12}));
  EXPECT_EQ(ends_->failure(), "");
}

TEST_F(NicEndsTest, PayloadInAnyOrderHasAKeyOfItsOwnByWhichNothingIsAdded) {
  nic_.relaxed_ordering = true;
  for (const NicHandler handler : {NicHandler::gpu, NicHandler::cpu}) {
    handler_ = handler;
    fake_.registered.clear();
    make();
    EXPECT_EQ(registered(0).access, kStrict);
    EXPECT_EQ(registered(1).access, kStrict - IBV_ACCESS_REMOTE_ATOMIC + IBV_ACCESS_RELAXED_ORDERING);
    EXPECT_EQ(registered(1).bytes, registered(0).bytes);
    EXPECT_EQ(registered(1).first_address, 0u);
    EXPECT_EQ(peer(0).remote_key - peer(0).signal_key, 1u) << "the second";
    EXPECT_EQ(peer(0).remote_key - peer(0).local_key, 0x100u);
    ends_.reset();
  }
}

TEST_F(NicEndsTest, HandlerGpuWithRingsInGpuMemory) {
  make();
  EXPECT_EQ(ends_->describe(), "handler gpu, rings in dma-buf, NIC fake_0:1, heap registered as dma-buf");
  const RingOptions layout{.depth = kDepth, .alignment = devx::kRingAlignment};
  for (int channel = 0; channel < kChannels; ++channel) {
    const RdmaQueuePair& params = peer(channel);
    const auto base = reinterpret_cast<std::uintptr_t>(params.ring);
    EXPECT_EQ(base % 65536, 0u);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(params.completion), base + layout.completion());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(params.doorbell_record), base + layout.doorbell() + 4);
    EXPECT_EQ(static_cast<void*>(params.doorbell), test::registers + test::kMachinePage + test::kRegister);
    EXPECT_NE(params.doorbell_record, nullptr);
    EXPECT_FALSE(params.system_scope);
    expect_params(channel, 0x1234);
    // As the first kernel must find it.
    EXPECT_EQ(device::rdma::tail_opcode(params.completion->tail), device::rdma::kCompletionNotYetWritten);
    EXPECT_EQ(*params.doorbell_record, 0u);
    EXPECT_EQ(params.state->posted, 0u);
    EXPECT_EQ(params.state->completed, 0u);
    EXPECT_EQ(params.state->failure, 0u);
  }
  EXPECT_NE(peer(0).ring, peer(1).ring);
  EXPECT_NE(peer(0).state, peer(1).state);
  // Of each: reset to initialised, to ready to receive with the number of the other end, to ready to send.
  EXPECT_EQ(commands(0x502).size(), 2u);
  const auto to_receive = commands(0x503);
  ASSERT_EQ(to_receive.size(), 2u);
  constexpr std::uint32_t kContext = 0xc0;
  constexpr std::uint32_t kRemoteNumber = kContext + 0xa8;
  EXPECT_EQ(to_receive[0].get(kRemoteNumber, 24), 0x1234u);
  EXPECT_EQ(to_receive[1].get(kRemoteNumber, 24), 0x1235u);
  EXPECT_EQ(commands(0x504).size(), 2u);
}

/// Of what the first asks for, the others ask for their own commands alone.
TEST_F(NicEndsTest, ManyQueuePairsShareWhatTheyCan) {
  make();
  const auto calls = [&](const char* name) { return std::count(fake_.calls.begin(), fake_.calls.end(), name); };
  EXPECT_EQ(fake_.commands.size(), 5u * kChannels + 3) << "each: CREATE_CQ, CREATE_QP, three states";
  for (const char* once : {"create_ah", "query_eqn", "alloc_uar NC", "umem_reg_ex dma-buf"}) {
    EXPECT_EQ(calls(once), 1) << once;
  }
}

TEST_F(NicEndsTest, IdleWhenTheLastEntryIsCompleteOrHasFailed) {
  make();
  EXPECT_TRUE(ends_->idle());
  RdmaQueueState& state = *peer(1).state;
  auto& tail = const_cast<device::rdma::CompletionEntry*>(peer(1).completion)->tail;
  state.posted = 5;
  EXPECT_FALSE(ends_->idle());
  tail = device::rdma::tail_word(3, device::rdma::kCompletionOk);
  EXPECT_FALSE(ends_->idle());
  tail = device::rdma::tail_word(4, device::rdma::kCompletionOk);
  EXPECT_TRUE(ends_->idle());
  state.posted = 65536 + 5;
  state.completed = 65536 + 3;
  EXPECT_TRUE(ends_->idle()) << "the device tells 16 bits";
  state.posted = 65536 + 6;
  EXPECT_FALSE(ends_->idle());
  state.failure = RdmaFailure{0x15, 0, device::rdma::kOpcodeWrite}.packed();
  EXPECT_TRUE(ends_->idle()) << "a kernel has seen it fail";
  state.failure = 0;
  tail = device::rdma::tail_word(65536 + 4, device::rdma::kCompletionError);
  EXPECT_TRUE(ends_->idle()) << "failed, and no kernel has seen it";
}

TEST_F(NicEndsTest, RingsInHostMemoryWhereTheDeviceCannotUseTheGpus) {
  fake_.refusals = {{"umem_reg_ex dma-buf", EOPNOTSUPP}, {"umem_reg_ex", EFAULT}};
  fake_.refusals_left = {{"umem_reg_ex", 1}};
  testing::internal::CaptureStderr();
  make();
  EXPECT_TRUE(warned(testing::internal::GetCapturedStderr(),
                     "rings lie in host memory, which makes every message slower, because: RDMA device fake_0"));
  EXPECT_EQ(ends_->describe(), "handler gpu, rings in host memory, NIC fake_0:1, heap registered as dma-buf");
  EXPECT_TRUE(peer(0).system_scope);
  // There the host sees what fails.
  auto* completion = const_cast<device::rdma::CompletionEntry*>(peer(1).completion);
  completion->syndrome = 0x15;
  completion->opcode_number = device::rdma::swap32(device::rdma::kOpcodeWrite << 24 | peer(1).number);
  completion->tail = device::rdma::tail_word(7, device::rdma::kCompletionError);
  EXPECT_TRUE(contains(ends_->failure(), "RDMA write to rank 1 over fake_0:1 failed (queue pair 0x1235, entry 7)"));
}

TEST_F(NicEndsTest, HandlerDoorbell) {
  refusal_of_pages_ = "GPU 0 may not map the page";
  EXPECT_EQ(refusal(), "DEEP_EP_NIC_HANDLER=gpu is impossible here: GPU 0 may not map the page");
  EXPECT_TRUE(commands(0x500).empty()) << "no queue pair is made before the page is tried";
  handler_ = NicHandler::doorbell;
  make();
  EXPECT_EQ(ends_->describe(), "handler doorbell, rings in dma-buf, NIC fake_0:1, heap registered as dma-buf");
  EXPECT_EQ(ends_->handler(), NicHandler::doorbell);
  EXPECT_TRUE(mapped_.empty());
  auto* const reg = reinterpret_cast<std::uint64_t*>(test::registers + test::kRegister);
  __atomic_store_n(reg, 0, __ATOMIC_RELAXED);
  // As a kernel does it. Queue pairs of this fake device share a register.
  for (int channel = 0; channel < kChannels; ++channel) {
    const RdmaQueuePair& pair = peer(channel);
    EXPECT_FALSE(pair.system_scope);
    EXPECT_EQ(pair.doorbell_record, nullptr) << "it is the thread's, see Ringer";
    __atomic_store_n(pair.doorbell, 70000, __ATOMIC_RELEASE);
    const std::uint64_t rung = device::rdma::doorbell_word(70000, pair.number);
    const Deadline deadline(30);
    while (__atomic_load_n(reg, __ATOMIC_ACQUIRE) != rung && !deadline.expired()) std::this_thread::yield();
    EXPECT_EQ(__atomic_load_n(reg, __ATOMIC_ACQUIRE), rung);
    // The records lie in host memory of their own.
    const auto& records = *std::find_if(fake_.registered.begin(), fake_.registered.end(),
                                        [](const auto& one) { return one.bytes == 65536; });
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(records.address) % 65536, 0u);
    const FakeVerbs::Command made = commands(0x500)[static_cast<std::size_t>(channel)];
    EXPECT_EQ(made.get(0xc0 + 0x500, 64), 8u * static_cast<unsigned>(channel)) << "dbr_addr";
    EXPECT_EQ(made.get(0xc0 + 0x720, 32), 0x131u) << "dbr_umem_id: not that of the rings, which came by dma-buf";
    EXPECT_EQ(static_cast<const std::uint32_t*>(records.address)[2 * channel + 1], device::rdma::record_word(70000));
  }
}

TEST_F(NicEndsTest, AGpuThatReordersWhatNicsWriteIsRefused) {
  nic_.gpu->keeps_order_of_writes = false;
  EXPECT_TRUE(contains(refusal(), "NIC fake_0:1 cannot serve this GPU"));
}

TEST_F(NicEndsTest, HealthSaysWhatTheDeviceHasDoneWithAllThatWasPosted) {
  make();
  EXPECT_EQ(ends_->failure(), "");
  EXPECT_EQ(ends_->health(), "all that was posted has arrived");
  RdmaQueueState& state = *peer(0).state;
  auto& completion = const_cast<device::rdma::CompletionEntry&>(*peer(0).completion);
  state.posted = 10;
  fake_.told = 9;
  fake_.fetched = 7;
  EXPECT_EQ(ends_->health(),
            "queue pair 0x1234 to rank 1: of 10 entries under way the device was not told of 1 and has not fetched 2");
  completion.tail = device::rdma::tail_word(9, device::rdma::kCompletionOk);
  EXPECT_EQ(ends_->health(), "all that was posted has arrived");
  completion.syndrome = 0x15;
  completion.opcode_number = device::rdma::swap32(device::rdma::kOpcodeWrite << 24 | peer(0).number);
  completion.tail = device::rdma::tail_word(7, device::rdma::kCompletionError);
  EXPECT_TRUE(contains(ends_->health(), "RDMA write to rank 1 over fake_0:1 failed (queue pair 0x1234, entry 7)"));
  fake_.queue_pair_state = 6;
  EXPECT_TRUE(contains(ends_->health(), "; queue pair 0x1235 to rank 1: its state is 'error'"));
  fake_.port.state = IBV_PORT_DOWN;
  EXPECT_TRUE(contains(ends_->health(), "port 1 is down; "));
}

TEST_F(NicEndsTest, ADeviceThatFailsIsNoLatePeer) {
  make();
  fake_.raise(IBV_EVENT_DEVICE_FATAL);
  EXPECT_NE(ends_->failure(), "");
  EXPECT_EQ(ends_->health(), "RDMA device fake_0:1 reported a fatal error: nothing on it completes any more");
}

TEST_F(NicEndsTest, CountersThatTheFirmwareRefusesAreAskedForOnce) {
  fake_.counter_set = 7;
  fake_.counter_set_is_foreign = true;
  testing::internal::CaptureStderr();
  make();
  EXPECT_TRUE(warned(testing::internal::GetCapturedStderr(), "losses and retries are not counted, because: RDMA"));
  EXPECT_TRUE(contains(ends_->describe(), "handler gpu"));
  const auto to_initialised = commands(0x502);
  ASSERT_EQ(to_initialised.size(), 3u) << "the first queue pair's twice";
  EXPECT_EQ(to_initialised[2].get(0xc0 + 0x60, 8), 0u);
  EXPECT_EQ(fake_.broken_rules, std::vector<std::string>{"a foreign set of counters"});
  fake_.broken_rules.clear();
}

TEST_F(NicEndsTest, TheAdministratorsTrafficClassCountsWhereNoVariableIsSet) {
  RdmaSettings settings;
  NicAssignment assignment{.nic = {.name = "mlx5_0"}, .port = {.number = 2, .traffic_class = 106}, .gid = {.index = 3}};
  EXPECT_EQ(path_by(settings, assignment).traffic_class, 106);
  EXPECT_EQ(path_by(settings, assignment).port, 2);
  EXPECT_EQ(path_by(settings, assignment).gid_index, 3);
  settings.has_traffic_class = true;
  EXPECT_EQ(path_by(settings, assignment).traffic_class, 0) << "0 is a value too";
  settings.has_traffic_class = false;
  assignment.port.traffic_class.reset();
  EXPECT_EQ(path_by(settings, assignment).traffic_class, 0);
}

TEST_F(NicEndsTest, WhyAHandlerIsImpossible) {
  fake_.firmware_refusals = {{0x500, {EREMOTEIO, 0x3, 0x12ab34}}};
  EXPECT_TRUE(contains(refusal(), "DEEP_EP_NIC_HANDLER=gpu is impossible here: RDMA device fake_0: DevX CREATE_QP"));
  nic_.nic.nic.capability = Capability::verbs;
  EXPECT_EQ(
      refusal(),
      "DEEP_EP_NIC_HANDLER=gpu is impossible here: NIC fake_0:1 is not one of NVIDIA's ConnectX or BlueField: its "
      "rings have another format");
  nic_.nic.nic.capability = Capability::mlx5;
  nic_.gpu.reset();
  EXPECT_EQ(refusal(), "DEEP_EP_NIC_HANDLER=gpu is impossible here: this rank's kernels run on the CPU");
}

TEST_F(NicEndsTest, DmaBufCanBeTurnedOff) {
  nic_.gpu->export_dma_buf = {};
  make();
  EXPECT_EQ(ends_->describe(), "handler gpu, rings in peer memory, NIC fake_0:1, heap registered as peer memory");
  EXPECT_EQ(registered(0).address, heap_->local());
  ends_.reset();
  fake_.refusals["reg_mr_iova2"] = EFAULT;
  const std::string text = refusal();
  EXPECT_TRUE(contains(text, "rings 6.1): turned off by NVSHMEM_IB_DISABLE_DMABUF or NCCL_DMABUF_ENABLE"));
  EXPECT_TRUE(contains(text, "peer memory: Bad address"));
}

TEST_F(NicEndsTest, TheDevicesQueuesMayBeSmallerThanTheRings) {
  handler_ = NicHandler::cpu;
  fake_.attributes.max_cqe = 80;
  make();
  EXPECT_EQ(peer(0).depth, kDepth);
  ends_.reset();
  fake_.attributes.max_cqe = 20;
  EXPECT_EQ(refusal(),
            "RDMA device fake_0: 2 queue pairs with 16 requests each under way are too many for it (completion queues "
            "hold 20, send queues 8192)");
}

TEST_F(NicEndsTest, OnePageOfRegistersIsMappedForAllEndsWhateverItsSize) {
  // Devices put their registers on pages of 4 KiB, sixteen of which then lie on one page of some machines.
  nic_.gpu->page_bytes = test::kMachinePage;
  fake_.uar.reg_addr = test::registers + 0x1800;
  NicAccess nic = nic_;
  nic.device = nic.open("fake_0", {.gid_index = 3}, fake_.functions, *heap_);
  std::vector<std::unique_ptr<Ends>> sets;
  for (int set = 0; set < 2; ++set) {
    sets.push_back(make_nic_ends(NicHandler::gpu, nic, executor_, {.peers = {1}, .depth = kDepth}));
    const RdmaQueuePair params = sets.back()->connect(0, sets.back()->address(0));
    EXPECT_EQ(static_cast<void*>(params.doorbell), test::registers + 0x1800 + test::kMachinePage);
  }
  sets.erase(sets.begin());
  EXPECT_EQ(mapped_, std::set<void*>{test::registers});
}

/// A page that is mapped for one set of queue pairs cannot be mapped for the next.
TEST_F(NicEndsTest, SetsShareWhatDevxHasMadeAndThoseOfRailsAloneKeepLandingNics) {
  NicAccess nic = nic_;
  const auto open = [&] { return nic.open("fake_0", {.gid_index = 3}, fake_.functions, *heap_); };
  nic.device = open();
  nic.landing_nics = {{}, open()};
  auto of_rails = make_nic_ends(NicHandler::gpu, nic, executor_, {.peers = {2, 3}, .depth = kDepth, .rail_width = 2});
  const auto others = make_nic_ends(NicHandler::gpu, nic, executor_, {.peers = {1}, .depth = kDepth});
  EXPECT_EQ(mapped_.size(), 1u);
  EXPECT_EQ(std::ranges::count(fake_.calls, "alloc_uar NC"), 1);
  const std::weak_ptr<Device> landing = nic.landing_nics.at(1);
  nic.landing_nics.clear();
  EXPECT_FALSE(landing.expired());
  of_rails.reset();
  EXPECT_TRUE(landing.expired());
}

}  // namespace
}  // namespace deep_ep::rdma::verbs
