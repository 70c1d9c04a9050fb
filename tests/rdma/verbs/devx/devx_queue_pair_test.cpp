// DevX commands as an mlx5 device would get them: every field of every mailbox, in order, and what each refusal
// becomes.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <memory>

#include "csrc/rdma/verbs/devx/devx_queue_pair.hpp"
#include "deep_ep/error.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/rdma/verbs/devx/structures.hpp"
#include "tests/rdma/verbs/fake_verbs.hpp"

namespace deep_ep::rdma::verbs::devx {
namespace {

using deep_ep::test::message_of;
using deep_ep::test::says;
using test::FakeVerbs;

// ---- What the device gets ----

class DevxTest : public testing::Test {
 protected:
  void SetUp() override {
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kRingAlignment, layout_.bytes)));
    path_.gid_index = 3;
    path_.service_level = 3;
    path_.traffic_class = 106;
  }
  void TearDown() override {
    EXPECT_EQ(fake_.alive, 0) << "something was not given back";
    EXPECT_EQ(fake_.broken_rules, std::vector<std::string>{});
  }

  std::unique_ptr<DevxQueuePair> make() {
    const auto device = open();
    const MemoryRange range{.address = memory_.get(), .bytes = layout_.bytes};
    const auto memory =
        std::make_shared<const Umem>(gpu_memory_ ? Umem::of_gpu_memory(device->context(), range, exporter_)
                                                 : Umem::of_host_memory(device->context(), range));
    return std::make_unique<DevxQueuePair>(device, QueueMemory{memory, 0, layout_}, port_offset_);
  }
  std::shared_ptr<DevxDevice> open() {
    return std::make_shared<DevxDevice>(Device::open("fake_0", fake_.functions), fake_.mlx5, path_);
  }
  static QueuePairAddress peer_of(const DevxQueuePair& pair) {
    QueuePairAddress peer = pair.address();
    peer.queue_pair = 0x4321;
    peer.packet_number = 0xabcdef;
    peer.mtu = IBV_MTU_2048;
    peer.outstanding_reads_in = 8;
    peer.gid[15] = 2;
    return peer;
  }
  /// The fields of a mailbox that are not zero, by name; everything else must be zero.
  static std::map<std::string, std::uint64_t> nonzero(const FakeVerbs::Command& command, const std::string& outer,
                                                      const std::string& context) {
    std::map<std::string, std::uint64_t> result;
    std::vector<std::uint8_t> rest = command.mailbox;
    const auto take = [&](const std::string& name, Field field) {
      if (field.width == 0 || field.width > 64) return;
      const std::uint64_t value = command.get(field.bit, field.width);
      if (value != 0) result[name] = value;
      for (std::uint32_t bit = field.bit; bit < field.bit + field.width; ++bit) {
        rest[bit / 8] = static_cast<std::uint8_t>(rest[bit / 8] & ~(0x80U >> bit % 8));
      }
    };
    const auto base = places(outer).at("context").bit;
    for (const auto& [name, field] : places(outer)) take(name, field);
    for (const auto& [name, field] : places(context)) take(name, within(base, field));
    if (context == "qpc") {
      const auto path = base + places("qpc").at("primary_address_path").bit;
      for (const auto& [name, field] : places("ads")) {
        if (name == "rgid_rip") {
          take("rgid_high", within(path, {field.bit, 64}));
          take("rgid_low", within(path, {field.bit + 64, 64}));
        } else {
          take("path." + name, within(path, field));
        }
      }
    }
    EXPECT_EQ(std::count(rest.begin(), rest.end(), 0), static_cast<std::ptrdiff_t>(rest.size()))
        << "bits outside the known fields are set";
    return result;
  }
  using Fields = std::map<std::string, std::uint64_t>;

  FakeVerbs fake_;
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  bool gpu_memory_ = false;
  DmaBufExporter exporter_;
  RingLayout layout_ = RingLayout::of(1024, kRingAlignment);
  int port_offset_ = 0;
  PathOptions path_;
};

TEST_F(DevxTest, CreationSendsTheseCommands) {
  const auto pair = make();
  ASSERT_EQ(fake_.commands.size(), 6U);
  EXPECT_EQ(fake_.commands[0].opcode(), 0x100);  // general capabilities
  EXPECT_EQ(fake_.commands[0].get(0x30, 16), 0x01U);
  EXPECT_EQ(fake_.commands[1].opcode(), 0x100);  // atomic capabilities
  EXPECT_EQ(fake_.commands[1].get(0x30, 16), 0x07U);
  EXPECT_EQ(fake_.commands[2].opcode(), 0x50b);  // a queue pair of verbs: which counters it has
  EXPECT_EQ(fake_.commands[3].opcode(), 0x842);  // whether ports are bonded

  const std::uint64_t completion = 1024 * 64;
  const std::uint64_t record = completion + 128;
  ASSERT_EQ(fake_.registered.size(), 1U);
  EXPECT_EQ(fake_.registered[0].address, memory_.get());
  EXPECT_EQ(fake_.registered[0].bytes, 2 * kRingAlignment);
  EXPECT_EQ(nonzero(fake_.commands[4], "create_cq_in", "cqc"), (Fields{{"opcode", 0x400},
                                                                       {"cq_umem_valid", 1},
                                                                       {"cq_umem_id", 0x31},
                                                                       {"cq_umem_offset", completion},
                                                                       {"cc", 1},
                                                                       {"oi", 1},
                                                                       {"uar_page", 0x66},
                                                                       {"c_eqn", 9},
                                                                       {"dbr_umem_valid", 1},
                                                                       {"dbr_umem_id", 0x31},
                                                                       {"dbr_addr", record + 64}}));
  EXPECT_EQ(nonzero(fake_.commands[5], "create_qp_in", "qpc"), (Fields{{"opcode", 0x500},
                                                                       {"wq_umem_valid", 1},
                                                                       {"wq_umem_id", 0x31},
                                                                       {"pm_state", 3},
                                                                       {"pd", 0x55},
                                                                       {"uar_page", 0x66},
                                                                       {"cqn_snd", 0x77},
                                                                       {"cqn_rcv", 0x77},
                                                                       {"log_sq_size", 10},
                                                                       {"rq_type", 3},
                                                                       {"ts_format", 1},
                                                                       {"dbr_umem_valid", 1},
                                                                       {"dbr_umem_id", 0x31},
                                                                       {"dbr_addr", record}}));
  EXPECT_EQ(pair->number(), 0x1234U);
  EXPECT_EQ(pair->address().queue_pair, 0x1234U);
}

TEST_F(DevxTest, ConnectionOnRoce) {
  const auto pair = make();
  const QueuePairAddress peer = peer_of(*pair);
  fake_.commands.clear();
  pair->connect(peer);
  ASSERT_EQ(fake_.commands.size(), 3U);
  EXPECT_EQ(nonzero(fake_.commands[0], "create_qp_in", "qpc"), (Fields{{"opcode", 0x502},
                                                                       {"qpn", 0x1234},
                                                                       {"pm_state", 3},
                                                                       {"rwe", 1},
                                                                       {"rae", 1},
                                                                       {"atomic_mode", 3},
                                                                       {"path.vhca_port_num", 1}}));
  EXPECT_EQ(nonzero(fake_.commands[1], "create_qp_in", "qpc"),
            (Fields{{"opcode", 0x503},
                    {"qpn", 0x1234},
                    {"mtu", IBV_MTU_2048},
                    {"log_msg_max", 30},
                    {"remote_qpn", 0x4321},
                    {"next_rcv_psn", 0xabcdef},
                    {"min_rnr_nak", 12},
                    {"log_rra_max", 4},
                    {"path.vhca_port_num", 1},
                    {"path.rmac_47_32", 0x0211},
                    {"path.rmac_31_0", 0x22334455},
                    {"rgid_low", 0x0000ffff0a010002},
                    {"path.src_addr_index", 3},
                    {"path.hop_limit", 64},
                    {"path.eth_prio", 3},
                    {"path.dscp", 106 >> 2},
                    {"path.udp_sport", udp_source_port(0x1234, 0x4321)}}));
  Fields expected{{"opcode", 0x504},  {"qpn", 0x1234},  {"log_sra_max", 3},
                  {"retry_count", 6}, {"rnr_retry", 7}, {"path.ack_timeout", 18}};
  if (pair->address().packet_number != 0) expected["next_send_psn"] = pair->address().packet_number;
  EXPECT_EQ(nonzero(fake_.commands[2], "create_qp_in", "qpc"), expected);
}

TEST_F(DevxTest, ConnectionOnInfiniBand) {
  fake_.port.link_layer = IBV_LINK_LAYER_INFINIBAND;
  fake_.port.lid = 7;
  path_.pkey_index = 2;
  const auto pair = make();
  QueuePairAddress peer = peer_of(*pair);
  peer.lid = 0x88;
  fake_.commands.clear();
  pair->connect(peer);
  ASSERT_EQ(fake_.commands.size(), 3U);
  EXPECT_EQ(nonzero(fake_.commands[0], "create_qp_in", "qpc").at("path.pkey_index"), 2U);
  EXPECT_EQ(nonzero(fake_.commands[1], "create_qp_in", "qpc"), (Fields{{"opcode", 0x503},
                                                                       {"qpn", 0x1234},
                                                                       {"mtu", IBV_MTU_2048},
                                                                       {"log_msg_max", 30},
                                                                       {"remote_qpn", 0x4321},
                                                                       {"next_rcv_psn", 0xabcdef},
                                                                       {"min_rnr_nak", 12},
                                                                       {"log_rra_max", 4},
                                                                       {"path.vhca_port_num", 1},
                                                                       {"path.rlid", 0x88},
                                                                       {"path.sl", 3}}))
      << "a traffic class without a global route is refused (syndrome 0x764216)";
}

TEST_F(DevxTest, PortsSayWhereToCountAndWhetherTheyAreBonded) {
  fake_.counter_set = 7;
  EXPECT_EQ(open()->counter_set(), 7);
  EXPECT_EQ(open()->bonded_ports(), 0);
  fake_.lag_state = 1;
  port_offset_ = 3;
  EXPECT_EQ(open()->bonded_ports(), 2);
  const auto pair = make();
  fake_.commands.clear();
  pair->connect(peer_of(*pair));
  const Fields init = nonzero(fake_.commands[0], "create_qp_in", "qpc");
  EXPECT_EQ(init.at("counter_set_id"), 7U);
  EXPECT_EQ(init.at("lag_tx_port_affinity"), 2U) << "1 + 3 % 2";
  fake_.port_select_mode = 1;
  EXPECT_EQ(open()->bonded_ports(), 0) << "the bond chooses by hash";

  fake_.port_select_mode = 0;
  fake_.firmware_refusals = {{0x50b, {EREMOTEIO, 0x2, 0x99}}, {0x842, {EREMOTEIO, 0x2, 0x99}}};
  EXPECT_EQ(open()->counter_set(), 0);
  EXPECT_EQ(open()->bonded_ports(), 0);
}

TEST_F(DevxTest, InfiniBandWithAGlobalRoute) {
  fake_.port.link_layer = IBV_LINK_LAYER_INFINIBAND;
  fake_.port.flags = IBV_QPF_GRH_REQUIRED;
  path_.gid_index = 0;
  fake_.gids[0] = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  const auto pair = make();
  QueuePairAddress peer = peer_of(*pair);
  peer.lid = 0x88;
  fake_.commands.clear();
  pair->connect(peer);
  ASSERT_EQ(fake_.commands.size(), 3U);
  Fields path = nonzero(fake_.commands[1], "create_qp_in", "qpc");
  std::erase_if(path, [](const auto& field) { return !field.first.starts_with("path.") && field.first[0] != 'r'; });
  EXPECT_EQ(path, (Fields{{"remote_qpn", 0x4321},
                          {"path.vhca_port_num", 1},
                          {"path.grh", 1},
                          {"path.hop_limit", 64},
                          {"rgid_high", 0xfe80000000000000},
                          {"rgid_low", 2},
                          {"path.rlid", 0x88},
                          {"path.sl", 3},
                          {"path.tclass", 106}}));
}

// ---- Refusals ----

TEST_F(DevxTest, EveryCommandThatTheFirmwareRefusesIsNamedWithItsSyndrome) {
  const std::map<std::uint16_t, std::string> creations{
      {0x100, "QUERY_HCA_CAP"}, {0x400, "CREATE_CQ"}, {0x500, "CREATE_QP"}};
  for (const auto& [opcode, name] : creations) {
    fake_.firmware_refusals = {{opcode, {EREMOTEIO, 0x3, 0x12ab34}}};
    EXPECT_TRUE(says(message_of<SystemError>([&] { make(); }),
                     {"RDMA device fake_0: DevX " + name + ": Remote I/O error", "status 0x3, syndrome 0x12ab34"}));
    EXPECT_EQ(fake_.alive, 0) << name;
  }
  const std::map<std::uint16_t, std::string> transitions{
      {0x502, "RST2INIT_QP"}, {0x503, "INIT2RTR_QP"}, {0x504, "RTR2RTS_QP"}};
  for (const auto& [opcode, name] : transitions) {
    fake_.firmware_refusals = {{opcode, {EREMOTEIO, 0x9, 0x77}}};
    const auto pair = make();
    EXPECT_TRUE(says(message_of<SystemError>([&] { pair->connect(peer_of(*pair)); }),
                     {"DevX " + name, "status 0x9, syndrome 0x77"}));
  }
  const auto pair = make();
  const QueuePairAddress peer = peer_of(*pair);
  // Drivers before Linux 5.19 answer success and leave the refusal to the mailbox.
  fake_.firmware_refusals = {{0x502, {0, 0x4, 0x99}}};
  EXPECT_TRUE(
      says(message_of<SystemError>([&] { pair->connect(peer); }), {"RST2INIT_QP", "status 0x4, syndrome 0x99"}));
  fake_.firmware_refusals = {{0x50b, {EINVAL, 0, 0}}};
  EXPECT_TRUE(says(message_of<SystemError>([&] { pair->progress(); }), {"QUERY_QP: Invalid argument"}));
  fake_.firmware_refusals = {{0x50b, {EPERM, 0, 0}}};
  EXPECT_TRUE(says(message_of<SystemError>([&] { pair->progress(); }), {"DevX is refused"}));
}

TEST_F(DevxTest, DevicesThatCannotServeAreRefusedFirst) {
  fake_.is_mlx5 = false;
  EXPECT_TRUE(says(message_of<InvalidArgument>([&] { make(); }), {"fake_0 is not an mlx5 device", "'cpu' can"}));
  fake_.is_mlx5 = true;
  fake_.completion_version = 0;
  EXPECT_TRUE(says(message_of<SystemError>([&] { make(); }), {"completion entries of version 0"}));
  fake_.completion_version = 1;
  fake_.atomic_operations = 1;
  EXPECT_TRUE(says(message_of<SystemError>([&] { make(); }), {"no 8-byte fetch-and-add", "PCI_ATOMIC_MODE"}));
  fake_.atomic_operations = 3;
  fake_.atomic_sizes = 4;
  EXPECT_TRUE(says(message_of<SystemError>([&] { make(); }), {"no 8-byte fetch-and-add", "sizes 0x4"}));
  fake_.atomic_sizes = 8;
  fake_.atomic_order = 0;
  EXPECT_TRUE(says(message_of<SystemError>([&] { make(); }), {"as if they were big-endian"}));
}

TEST_F(DevxTest, DoorbellRegistersAreTriedFromBestToWorst) {
  const auto taken = [&] {
    make();
    return *std::find_if(fake_.calls.rbegin(), fake_.calls.rend(),
                         [](const std::string& call) { return call.starts_with("alloc_uar"); });
  };
  EXPECT_EQ(taken(), "alloc_uar dedicated");
  fake_.refusals["alloc_uar dedicated"] = EOPNOTSUPP;
  EXPECT_EQ(taken(), "alloc_uar NC");
  fake_.refusals["alloc_uar NC"] = ENOMEM;
  EXPECT_EQ(taken(), "alloc_uar BF");
  fake_.refusals["alloc_uar BF"] = EPERM;
  EXPECT_TRUE(says(message_of<SystemError>([&] { make(); }),
                   {"fake_0: mlx5dv_devx_alloc_uar", "own register: Operation not supported",
                    "shared register: Cannot allocate memory", "write-combining register: Operation not permitted"}));
}

TEST_F(DevxTest, RingsInGpuMemoryGoByDmaBufThenByPeerMemory) {
  gpu_memory_ = true;
  exporter_ = [](void*, std::size_t) { return UniqueFd(::open("/dev/null", O_RDONLY)); };
  EXPECT_EQ(make()->memory_path(), RegistrationPath::dma_buf);
  EXPECT_EQ(fake_.registered.back().address, nullptr) << "an offset into the dma-buf";
  fake_.refusals["umem_reg_ex dma-buf"] = EINVAL;
  EXPECT_EQ(make()->memory_path(), RegistrationPath::peer_memory);
  fake_.refusals["umem_reg_ex"] = EFAULT;
  EXPECT_TRUE(says(message_of<SystemError>([&] { make(); }),
                   {"128.00 KiB of GPU memory", "dma-buf (needs Linux 6.1 or later): mlx5dv_devx_umem_reg_ex: Invalid",
                    "peer memory: mlx5dv_devx_umem_reg_ex: Bad address"}));
}

TEST_F(DevxTest, OtherRefusalsOfTheSetUp) {
  fake_.refusals = {{"umem_reg_ex", ENOMEM}};
  EXPECT_TRUE(says(message_of<SystemError>([&] { make(); }), {"mlx5dv_devx_umem_reg_ex of 128.00 KiB of CPU memory"}));
  fake_.refusals = {{"query_eqn", EINVAL}};
  EXPECT_TRUE(says(message_of<SystemError>([&] { make(); }), {"mlx5dv_devx_query_eqn: Invalid argument"}));
  fake_.refusals = {{"init_obj", EOPNOTSUPP}};
  EXPECT_TRUE(says(message_of<SystemError>([&] { make(); }), {"mlx5dv_init_obj of the protection domain"}));
  fake_.refusals = {{"create_ah", ENETUNREACH}};
  const auto pair = make();
  EXPECT_TRUE(says(message_of<SystemError>([&] { pair->connect(peer_of(*pair)); }),
                   {"ibv_create_ah for queue pair 0x4321 at GID", "Network is unreachable", "no route to the peer"}));
  fake_.refusals.clear();
  QueuePairAddress mixed = peer_of(*pair);
  mixed.gid[0] = 0xfd;
  EXPECT_TRUE(says(message_of<RankMismatch>([&] { pair->connect(mixed); }), {"different families"}));
}

}  // namespace
}  // namespace deep_ep::rdma::verbs::devx
