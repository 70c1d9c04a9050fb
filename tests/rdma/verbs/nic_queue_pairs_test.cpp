// What kernels are handed when the NIC does the work, and which handler that is: with a device that records what it is
// asked, so nothing is sent.
#include "csrc/rdma/verbs/nic_queue_pairs.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "csrc/rdma/connections.hpp"
#include "csrc/rdma/verbs/devx/devx_queue_pair.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "tests/rdma/contains.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/rdma/verbs/fake_verbs.hpp"

namespace deep_ep::rdma::verbs {
namespace {

using deep_ep::test::contains;
using rdma::test::message_of;
using test::FakeVerbs;

constexpr std::size_t kHeapBytes = std::size_t{1} << 20;
constexpr int kChannels = 2;
constexpr std::uint32_t kDepth = 128;

class FakeHeap final : public SymmetricHeap {
 public:
  std::byte* local() const override { return memory_; }
  std::size_t bytes() const override { return kHeapBytes; }
  HeapKind kind() const override { return HeapKind::posix_fd; }
  std::span<std::byte* const> peers() const override { return peers_; }
  std::byte* const* device_peers() const override { return peers_; }
  void unmap_peers() noexcept override {}

 private:
  alignas(4096) mutable std::byte memory_[kHeapBytes]{};
  std::byte* peers_[2] = {memory_, nullptr};  // the other rank is far away
};

/// A page of registers, followed by where it is mapped.
alignas(kDoorbellPageBytes) std::byte registers[2 * kDoorbellPageBytes];
constexpr std::size_t kRegister = 0x800;

class FakeRegistrar final : public PageRegistrar {
 public:
  explicit FakeRegistrar(std::string refusal) : refusal_(std::move(refusal)) {}
  void* register_page(void* page) override {
    if (!refusal_.empty()) throw SystemError(refusal_);
    EXPECT_TRUE(registered_.insert(page).second);
    return static_cast<std::byte*>(page) + kDoorbellPageBytes;
  }
  void unregister_page(void* page) noexcept override { EXPECT_EQ(registered_.erase(page), 1u); }

 private:
  std::string refusal_;
  std::set<void*> registered_;
};

/// Rank 0 of two. Rank 1 says just what rank 0 says, with the table's entries for the other rank in place.
class Mirror final : public Bootstrap {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  std::vector<std::byte> all_gather(std::span<const std::byte> mine) override {
    constexpr std::size_t kVerdict = 512;  // of agree(): nothing to mirror
    const std::size_t entries = mine.size() == kVerdict ? 1 : 2 * kChannels;
    const std::size_t bytes = mine.size() / entries;
    std::vector<std::byte> all(2 * mine.size());
    std::copy(mine.begin(), mine.end(), all.begin());
    for (std::size_t entry = 0; entry < entries; ++entry) {
      const std::size_t to = entries == 1 ? entry : entry ^ 1;
      std::memcpy(all.data() + mine.size() + to * bytes, mine.data() + entry * bytes, bytes);
    }
    return all;
  }
};

class NicQueuePairsTest : public testing::Test {
 protected:
  NicQueuePairsTest() {
    fake_.uar.reg_addr = registers + kRegister;
    fake_.uar.base_addr = registers;
    nic_.path = {.port = 1, .gid_index = 3};
    nic_.name = "fake_0:1";
    nic_.mlx5 = true;
    nic_.gpu_memory = true;
    nic_.exporter = [](void*, std::size_t) { return UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); };
    nic_.handler = "auto";
    nic_.mlx5_functions = [this]() -> const Mlx5Functions& { return fake_.mlx5; };
    nic_.make_registrar = [this] { return std::make_unique<FakeRegistrar>(page_refusal_); };
  }
  ~NicQueuePairsTest() override {
    pairs_.reset();
    EXPECT_EQ(fake_.alive, 0);
  }

  void make() {
    const ConnectionOptions options{.peers = {1}, .channels = kChannels, .depth = kDepth, .batch = 16};
    table_.assign(std::size_t{2} * kChannels, {});
    Mirror bootstrap;
    const QueuePairPlan plan{bootstrap, executor_, heap_, options, table_};
    pairs_ = make_nic_queue_pairs(plan, [&] {
      NicAccess nic = nic_;
      nic.device = Device::open("fake_0", fake_.functions);
      return nic;
    });
  }
  std::string refusal() {
    return message_of<SystemError>([&] { make(); });
  }
  const RdmaPeerParams& peer(int channel) const { return table_[2 * static_cast<std::size_t>(channel) + 1]; }
  const FakeVerbs::Registered& registered(std::size_t i) const { return fake_.registered.at(i); }
  /// Commands with this opcode.
  std::vector<FakeVerbs::Command> commands(std::uint16_t opcode) const {
    std::vector<FakeVerbs::Command> found;
    for (const auto& command : fake_.commands) {
      if (command.opcode() == opcode) found.push_back(command);
    }
    return found;
  }

  FakeVerbs fake_;
  std::shared_ptr<Executor> executor_ = make_host_executor();
  std::shared_ptr<FakeHeap> heap_ = std::make_shared<FakeHeap>();
  NicAccess nic_;
  std::string page_refusal_;
  std::vector<RdmaPeerParams> table_;
  std::unique_ptr<QueuePairSet> pairs_;
};

constexpr unsigned kStrict =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

TEST_F(NicQueuePairsTest, HandlerCpu) {
  nic_.handler = "cpu";
  nic_.gpu_memory = false;
  make();
  EXPECT_EQ(pairs_->describe(), "handler cpu, wire verbs, NIC fake_0:1, heap registered as host memory");
  // The heap from address 0, strictly ordered; then the sinks at their own address.
  EXPECT_EQ(registered(0).address, heap_->local());
  EXPECT_EQ(registered(0).bytes, kHeapBytes);
  EXPECT_EQ(registered(0).first_address, 0u);
  EXPECT_EQ(registered(0).access, kStrict);
  EXPECT_EQ(registered(1).bytes, kChannels * sizeof(std::uint64_t));
  EXPECT_EQ(table_[0].queue.depth, 0u);
  EXPECT_EQ(table_[2].queue.depth, 0u);
  for (int channel = 0; channel < kChannels; ++channel) {
    const RdmaPeerParams& params = peer(channel);
    EXPECT_EQ(params.queue.kind, RdmaDoorbell::producer_index);
    EXPECT_EQ(params.queue.number, 0x11u + static_cast<std::uint32_t>(channel));
    EXPECT_EQ(params.queue.depth, kDepth);
    EXPECT_EQ(params.queue.batch, 16u);
    EXPECT_EQ(params.queue.peer, 1);
    EXPECT_EQ(params.local_key, 0x100u);
    EXPECT_EQ(params.remote_key, 0x200u);
    EXPECT_EQ(params.signal_key, 0x200u);
    EXPECT_EQ(params.queue.sink.key, 0x101u);
    EXPECT_EQ(params.queue.sink.address, registered(1).first_address + 8 * static_cast<std::uint64_t>(channel));
  }
  // Each is connected to the one of the same channel, whose number is the same in the mirror.
  std::vector<std::uint32_t> connected_to;
  for (const auto& change : fake_.state_changes) {
    if (change.attributes.qp_state == IBV_QPS_RTR) connected_to.push_back(change.attributes.dest_qp_num);
  }
  EXPECT_EQ(connected_to, (std::vector<std::uint32_t>{0x11, 0x12}));
  EXPECT_FALSE(pairs_->failure().has_value());
}

TEST_F(NicQueuePairsTest, HandlerGpuWithRingsInGpuMemory) {
  make();
  EXPECT_EQ(pairs_->describe(), "handler gpu, rings in dma-buf, NIC fake_0:1, heap registered as dma-buf");
  const auto layout = devx::QueuePairLayout::of(kDepth);
  for (int channel = 0; channel < kChannels; ++channel) {
    const RdmaPeerParams& params = peer(channel);
    const auto base = reinterpret_cast<std::uintptr_t>(params.queue.ring);
    EXPECT_EQ(base % 65536, 0u);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(params.queue.completion), base + layout.completion);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(params.queue.doorbell_record), base + layout.doorbell_record + 4);
    EXPECT_EQ(static_cast<void*>(params.queue.doorbell), registers + kDoorbellPageBytes + kRegister);
    EXPECT_EQ(params.queue.kind, RdmaDoorbell::device_register);
    EXPECT_EQ(params.queue.number, 0x1234u + static_cast<std::uint32_t>(channel));
    EXPECT_EQ(params.queue.depth, kDepth);
    EXPECT_EQ(params.queue.batch, 16u);
    EXPECT_FALSE(params.queue.system_scope);
    EXPECT_EQ(params.queue.peer, 1);
    EXPECT_EQ(params.local_key, 0x100u);
    EXPECT_EQ(params.remote_key, 0x200u);
    EXPECT_EQ(params.queue.sink.key, 0x101u);
    // As the first kernel must find it.
    EXPECT_EQ(device::rdma::tail_opcode(params.queue.completion->tail), device::rdma::kCompletionNotYetWritten);
    EXPECT_EQ(*params.queue.doorbell_record, 0u);
    EXPECT_EQ(params.queue.state->posted, 0u);
    EXPECT_EQ(params.queue.state->completed, 0u);
    EXPECT_EQ(params.queue.state->failure, 0u);
  }
  EXPECT_NE(peer(0).queue.ring, peer(1).queue.ring);
  EXPECT_NE(peer(0).queue.state, peer(1).queue.state);
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

TEST_F(NicQueuePairsTest, IdleWhenTheLastEntryIsCompleteOrHasFailed) {
  make();
  EXPECT_TRUE(pairs_->idle());
  RdmaQueueState& state = *peer(1).queue.state;
  auto& tail = const_cast<device::rdma::CompletionEntry*>(peer(1).queue.completion)->tail;
  state.posted = 5;
  EXPECT_FALSE(pairs_->idle());
  tail = device::rdma::tail_word(3, device::rdma::kCompletionOk);
  EXPECT_FALSE(pairs_->idle());
  tail = device::rdma::tail_word(4, device::rdma::kCompletionOk);
  EXPECT_TRUE(pairs_->idle());
  state.posted = 65536 + 5;
  state.completed = 65536 + 3;
  EXPECT_TRUE(pairs_->idle()) << "the device tells 16 bits";
  state.posted = 65536 + 6;
  EXPECT_FALSE(pairs_->idle());
  state.failure = RdmaFailure{0x15, 0, device::rdma::kOpcodeWrite}.packed();
  EXPECT_TRUE(pairs_->idle()) << "a kernel has seen it fail";
  state.failure = 0;
  tail = device::rdma::tail_word(65536 + 4, device::rdma::kCompletionError);
  EXPECT_TRUE(pairs_->idle()) << "failed, and no kernel has seen it";
}

TEST_F(NicQueuePairsTest, RingsInHostMemoryWhereTheDeviceCannotUseTheGpus) {
  fake_.refusals = {{"umem_reg_ex", EOPNOTSUPP}, {"umem_reg", EFAULT}};
  fake_.refusals_left = {{"umem_reg", 1}};
  make();
  EXPECT_EQ(pairs_->describe(), "handler gpu, rings in host memory, NIC fake_0:1, heap registered as dma-buf");
  EXPECT_TRUE(peer(0).queue.system_scope);
  // There the host sees what fails.
  auto* completion = const_cast<device::rdma::CompletionEntry*>(peer(1).queue.completion);
  completion->syndrome = 0x15;
  completion->opcode_number = device::rdma::swap32(device::rdma::kOpcodeWrite << 24 | peer(1).queue.number);
  completion->tail = device::rdma::tail_word(7, device::rdma::kCompletionError);
  const std::optional<Failure> failure = pairs_->failure();
  ASSERT_TRUE(failure.has_value());
  EXPECT_TRUE(contains(describe(*failure), "RDMA write to rank 1 over fake_0:1 failed (queue pair 0x1235, entry 7)"));
}

TEST_F(NicQueuePairsTest, AutoFallsBackWhereThePageMayNotBeMapped) {
  page_refusal_ = "GPU 0 may not map the page";
  testing::internal::CaptureStderr();
  make();
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(pairs_->describe(), "handler cpu, wire verbs, NIC fake_0:1, heap registered as dma-buf"));
  if (std::getenv("DEEP_EP_LOG") == nullptr && std::getenv("DEEP_EP_LOG_FILE") == nullptr) {
    EXPECT_TRUE(contains(said, "because: GPU 0 may not map the page"));
  }
  EXPECT_EQ(peer(0).queue.kind, RdmaDoorbell::producer_index);
  EXPECT_TRUE(commands(0x500).empty()) << "no queue pair is made before the page is tried";
}

TEST_F(NicQueuePairsTest, AutoFallsBackWhereTheFirmwareRefuses) {
  fake_.firmware_refusals[0x500] = {EREMOTEIO, 0x3, 0x5d7f1a};
  make();
  EXPECT_TRUE(contains(pairs_->describe(), "handler cpu"));
}

TEST_F(NicQueuePairsTest, GpuIsTakenAtItsWord) {
  nic_.handler = "gpu";
  page_refusal_ = "GPU 0 may not map the page";
  EXPECT_EQ(refusal(), "DEEP_EP_NIC_HANDLER=gpu is impossible here: GPU 0 may not map the page");
  nic_.mlx5 = false;
  EXPECT_EQ(refusal(),
            "DEEP_EP_NIC_HANDLER=gpu is impossible here: NIC fake_0:1 is none of NVIDIA's ConnectX or BlueField: its "
            "rings have another format");
  nic_.mlx5 = true;
  nic_.gpu_memory = false;
  EXPECT_EQ(refusal(), "DEEP_EP_NIC_HANDLER=gpu is impossible here: this rank's kernels run on the CPU");
  nic_.gpu_memory = true;
  page_refusal_.clear();
  make();
  EXPECT_TRUE(contains(pairs_->describe(), "handler gpu"));
}

TEST_F(NicQueuePairsTest, CpuIsTakenAtItsWord) {
  nic_.handler = "cpu";
  make();
  EXPECT_TRUE(contains(pairs_->describe(), "handler cpu"));
  EXPECT_TRUE(fake_.commands.empty());
}

TEST_F(NicQueuePairsTest, DmaBufCanBeTurnedOff) {
  RdmaSettings settings;
  settings.dma_buf = false;
  nic_.exporter = exporter_by(settings);
  make();
  EXPECT_EQ(pairs_->describe(), "handler gpu, rings in peer memory, NIC fake_0:1, heap registered as peer memory");
  EXPECT_EQ(registered(0).address, heap_->local());
  pairs_.reset();
  fake_.refusals["reg_mr_iova2"] = EFAULT;
  const std::string text = refusal();
  EXPECT_TRUE(contains(text, "dma-buf: turned off by NVSHMEM_IB_DISABLE_DMABUF or NCCL_DMABUF_ENABLE"));
  EXPECT_TRUE(contains(text, "peer memory: ibv_reg_mr: "));
}

TEST_F(NicQueuePairsTest, TheDevicesQueuesMayBeSmallerThanTheRings) {
  nic_.handler = "cpu";
  fake_.attributes.max_cqe = 80;
  make();
  EXPECT_EQ(peer(0).queue.depth, kDepth);
  pairs_.reset();
  fake_.attributes.max_cqe = 20;
  EXPECT_EQ(refusal(),
            "RDMA device fake_0: 2 queue pairs with 16 requests each under way are too many for it (completion queues "
            "hold 20, send queues 8192)");
}

}  // namespace
}  // namespace deep_ep::rdma::verbs
