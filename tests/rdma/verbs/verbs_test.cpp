// Devices, registration, queue pairs and the verbs wire against a device without hardware: what is asked in which
// order, what follows a refusal, and what the messages say. tests/rxe/ runs the same code on real devices.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "csrc/rdma/ring/wire.hpp"
#include "csrc/rdma/verbs/libraries.hpp"
#include "csrc/support/deadline.hpp"
#include "deep_ep/error.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/rdma/verbs/nic_fixture.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::rdma::verbs::test {
namespace {

using deep_ep::test::contains;
using deep_ep::test::message_of;
using deep_ep::test::says;

// ---- Libraries ----

TEST(VerbsLibraries, ReportNamesBothOrSaysWhyNot) {
  const std::vector<LoadedLibrary> libraries = report_libraries();
  ASSERT_EQ(libraries.size(), 2U);
  EXPECT_EQ(libraries[0].name, "libibverbs.so.1");
  EXPECT_EQ(libraries[1].name, "libmlx5.so.1");
  for (const LoadedLibrary& library : libraries) EXPECT_TRUE(!library.usable() || library.path.front() == '/');
  const LoadedLibrary missing{.name = "libibverbs.so.1", .error = "no such file"};
  EXPECT_EQ(missing.text(), "libibverbs.so.1: not usable: no such file");
  const LoadedLibrary found{.name = "libmlx5.so.1", .path = "/lib/libmlx5.so.1.24.30.0"};
  EXPECT_EQ(found.text(), "libmlx5.so.1: /lib/libmlx5.so.1.24.30.0");
}

// ---- Devices and registration ----

class VerbsTest : public testing::Test {
 protected:
  std::shared_ptr<Device> open(const std::string& name = "fake_0") {
    return std::make_shared<Device>(name, path_, fake_.functions, heap_);
  }
  QueuePair pair() { return QueuePair(open()); }
  void TearDown() override {
    EXPECT_EQ(fake_.alive, 0) << "something was not given back";
    EXPECT_EQ(fake_.broken_rules, std::vector<std::string>{});
  }

  FakeVerbs fake_;
  PathOptions path_{.gid_index = 3};
  alignas(4096) std::array<std::byte, 8192> memory_{};
  MemoryRange heap_{.address = memory_.data(), .bytes = 8192};
};

TEST_F(VerbsTest, UnknownDeviceListsThoseThatExist) {
  EXPECT_TRUE(says(message_of<InvalidArgument>([&] { open("mlx5_3"); }), {"'mlx5_3'", "sees: fake_0"}));
}

TEST_F(VerbsTest, RefusedMemoryNamesTheLimitThatUsuallyIsTheCause) {
  fake_.refusals["reg_mr_iova2"] = ENOMEM;
  EXPECT_TRUE(
      says(message_of<SystemError>([&] { open(); }), {"fake_0: ibv_reg_mr of 8.00 KiB of CPU memory", "ulimit -l"}));
}

TEST_F(VerbsTest, GpuMemoryGoesByDmaBufThenByPeerMemory) {
  DmaBufExporter exporter = [](void*, std::size_t) { return UniqueFd(::open("/dev/null", O_RDONLY)); };
  heap_.gpu = &exporter;
  EXPECT_STREQ(open()->heap_path(), "dma-buf");
  fake_.refusals["reg_dmabuf_mr"] = EOPNOTSUPP;
  EXPECT_STREQ(open()->heap_path(), "peer memory");
  fake_.refusals["reg_mr_iova2"] = EFAULT;
  const auto refusal = [&] { return message_of<SystemError>([&] { open(); }); };
  EXPECT_TRUE(says(refusal(), {"ibv_reg_mr of 8.00 KiB of GPU memory", "rings 6.1): Operation not supported",
                               "peer memory: Bad address", "nvidia-peermem is"}));
  exporter = [](void*, std::size_t) -> UniqueFd { throw SystemError("the GPU says no"); };
  EXPECT_TRUE(says(refusal(), {"rings 6.1): the GPU says no"}));
  exporter = {};
  fake_.refusals.erase("reg_mr_iova2");
  EXPECT_STREQ(open()->heap_path(), "peer memory");
}

// ---- Queue pairs ----

TEST_F(VerbsTest, ConnectionGoesThroughTheThreeStatesWithWhatWasAgreed) {
  path_.traffic_class = 106;
  path_.service_level = 3;
  QueuePair pair = this->pair();
  QueuePairAddress peer = pair.address();
  peer.queue_pair = 0x99;
  peer.packet_number = 0x1234;
  peer.mtu = IBV_MTU_1024;
  peer.outstanding_reads_in = 4;
  peer.gid[15] = 2;
  pair.connect(peer);

  ASSERT_EQ(fake_.state_changes.size(), 3U);
  const auto& init = fake_.state_changes[0];
  EXPECT_EQ(init.attributes.qp_state, IBV_QPS_INIT);
  EXPECT_EQ(init.mask, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  EXPECT_NE(init.attributes.qp_access_flags & IBV_ACCESS_REMOTE_ATOMIC, 0U);
  EXPECT_EQ(init.attributes.qp_access_flags & IBV_ACCESS_REMOTE_READ, 0U);
  const ibv_qp_attr& receive = fake_.state_changes[1].attributes;
  EXPECT_EQ(receive.qp_state, IBV_QPS_RTR);
  EXPECT_EQ(receive.path_mtu, IBV_MTU_1024);
  EXPECT_EQ(receive.dest_qp_num, 0x99U);
  EXPECT_EQ(receive.rq_psn, 0x1234U);
  EXPECT_EQ(receive.max_dest_rd_atomic, 16);
  EXPECT_EQ(receive.ah_attr.is_global, 1);
  EXPECT_EQ(receive.ah_attr.grh.sgid_index, 3);
  EXPECT_EQ(receive.ah_attr.grh.traffic_class, 106);
  EXPECT_EQ(receive.ah_attr.sl, 3);
  EXPECT_EQ(std::memcmp(receive.ah_attr.grh.dgid.raw, peer.gid.data(), 16), 0);
  const ibv_qp_attr& send = fake_.state_changes[2].attributes;
  EXPECT_EQ(send.qp_state, IBV_QPS_RTS);
  EXPECT_EQ(send.sq_psn, pair.address().packet_number);
  EXPECT_EQ(send.timeout, 18);
  EXPECT_EQ(send.retry_cnt, 6);
  EXPECT_EQ(send.max_rd_atomic, 4);
}

TEST_F(VerbsTest, InfiniBandGoesByLidAndByAGlobalRouteWhereOneOfThePortsNeedsIt) {
  fake_.port.link_layer = IBV_LINK_LAYER_INFINIBAND;
  fake_.port.lid = 7;
  for (const auto& [here, there] : {std::pair(0, 0), {IBV_QPF_GRH_REQUIRED, 0}, {0, 1}}) {
    fake_.port.flags = static_cast<std::uint8_t>(here);
    QueuePair pair = this->pair();
    QueuePairAddress peer = pair.address();
    peer.needs_global_route = static_cast<std::uint8_t>(there);
    pair.connect(peer);
    const ibv_ah_attr& route = fake_.state_changes.at(fake_.state_changes.size() - 2).attributes.ah_attr;
    EXPECT_EQ(route.dlid, 7);
    EXPECT_EQ(route.is_global, here != 0 || there != 0 ? 1 : 0);
    if (route.is_global == 0) continue;
    EXPECT_EQ(route.grh.sgid_index, 3);
    EXPECT_EQ(route.grh.hop_limit, 64);
    EXPECT_EQ(std::memcmp(route.grh.dgid.raw, peer.gid.data(), 16), 0);
  }
}

TEST_F(VerbsTest, EndsThatCannotTalkAreTold) {
  QueuePair pair = this->pair();
  QueuePairAddress peer = pair.address();
  peer.ethernet = 0;
  EXPECT_TRUE(
      says(message_of<RankMismatch>([&] { pair.connect(peer); }), {"fake_0 is Ethernet", "the peer is InfiniBand"}));
  peer = pair.address();
  peer.gid[10] = 0;
  EXPECT_TRUE(says(message_of<RankMismatch>([&] { pair.connect(peer); }), {"different families"}));
  EXPECT_EQ(fake_.state_changes.size(), 1U) << "nothing was changed after INIT";
  fake_.refusals["modify_qp"] = ENETUNREACH;
  EXPECT_TRUE(says(message_of<SystemError>([&] { pair.connect(pair.address()); }),
                   {"ibv_modify_qp of queue pair 0x11 to RTR with queue pair 0x11 at GID", "Network is unreachable",
                    "no route to the peer"}));
}

TEST_F(VerbsTest, APortThatCannotBeUsedIsNamed) {
  fake_.port.state = IBV_PORT_DOWN;
  EXPECT_TRUE(says(message_of<SystemError>([&] { open(); }), {"fake_0 port 1 is down, not active"}));
}

// ---- The wire ----

/// Ends of the handler `cpu` are its wire.
class VerbsWireTest : public NicFixture {
 protected:
  VerbsWireTest() {
    nic_.gpu.reset();
    handler_ = NicHandler::cpu;
    fake_.attributes.max_qp_wr = 16;
    make({.peers = {1}});
    wire_ = dynamic_cast<Wire*>(ends_.get());
  }

  static Operation write(std::uint64_t id, bool signalled = false) {
    return {.index = id, .opcode = device::rdma::kOpcodeWrite, .signalled = signalled, .length = 64, .local = {0, 1}};
  }
  static std::vector<Operation> writes(std::uint64_t first, std::size_t count) {
    std::vector<Operation> result;
    for (std::size_t i = 0; i < count; ++i) result.push_back(write(first + i));
    return result;
  }
  std::vector<std::pair<std::uint64_t, Syndrome>> poll() {
    std::vector<std::pair<std::uint64_t, Syndrome>> result;
    std::array<WireCompletion, 3> some;
    while (const std::size_t count = wire_->poll(some)) {
      for (std::size_t i = 0; i < count; ++i) result.emplace_back(some[i].index, some[i].syndrome);
    }
    return result;
  }

  Wire* wire_ = nullptr;
};

using Told = std::pair<std::uint64_t, Syndrome>;

TEST_F(VerbsWireTest, AQuarterOfTheQueueAsksForACompletion) {
  EXPECT_EQ(wire_->depth(), 16u);
  wire_->post(0, writes(0, 16));
  std::vector<int> asking;
  for (std::size_t i = 0; i < fake_.posted.size(); ++i) {
    if ((fake_.posted[i].request.send_flags & IBV_SEND_SIGNALED) != 0) asking.push_back(static_cast<int>(i));
  }
  EXPECT_EQ(asking, (std::vector<int>{3, 7, 11, 15}));
  fake_.complete(7);
  EXPECT_EQ(poll(), std::vector<Told>{(Told{7, Syndrome::none})});
}

TEST_F(VerbsWireTest, AFailureIsReportedAfterWhatSucceeded) {
  std::vector<Operation> operations = writes(100, 6);
  operations[1].signalled = true;
  wire_->post(0, operations);
  fake_.complete(1);
  fake_.complete(3, IBV_WC_REM_ACCESS_ERR, 0x89);
  std::array<WireCompletion, 8> told;
  ASSERT_EQ(wire_->poll(told), 2U);
  EXPECT_EQ(told[0].index, 101U);
  EXPECT_EQ(told[0].syndrome, Syndrome::none);
  EXPECT_EQ(told[1].index, 103U);
  EXPECT_EQ(told[1].syndrome, Syndrome::remote_access);
  EXPECT_EQ(told[1].vendor_syndrome, 0x89);
  fake_.complete(5, IBV_WC_WR_FLUSH_ERR);  // devices differ in whether they report this
  EXPECT_EQ(poll(), std::vector<Told>{(Told{105, Syndrome::flushed})});
}

TEST_F(VerbsWireTest, ADeviceThatRefusesARequestIsAnException) {
  fake_.post_accepts = 3;
  EXPECT_TRUE(says(message_of<SystemError>([&] { wire_->post(0, writes(0, 8)); }),
                   {"fake_0", "ibv_post_send to queue pair 0x11"}));
}

TEST_F(VerbsWireTest, DeviceThatFailsIsAnException) {
  fake_.raise(IBV_EVENT_DEVICE_FATAL);
  const Deadline deadline(deep_ep::test::patience());
  std::array<WireCompletion, 4> some;
  EXPECT_TRUE(says(message_of<SystemError>([&] {
                     while (!deadline.expired()) wire_->poll(some);
                   }),
                   {"fake_0 reported a fatal error"}));
}

TEST_F(VerbsTest, ADeviceMustAdd) {
  fake_.attributes.atomic_cap = IBV_ATOMIC_NONE;
  EXPECT_TRUE(says(message_of<SystemError>([&] { open(); }), {"fake_0 has no 8-byte fetch-and-add", "PCI_ATOMIC"}));
}

}  // namespace
}  // namespace deep_ep::rdma::verbs::test
