// DevX commands as an mlx5 device would get them: every field of every mailbox, in order, and what each refusal
// becomes.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <sstream>
#include <string>

#include "csrc/rdma/verbs/devx/devx_queue_pair.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/rdma/verbs/fake_verbs.hpp"

namespace deep_ep::rdma::verbs::devx {
namespace {

using deep_ep::test::message_of;
using deep_ep::test::says;
using test::FakeVerbs;

/// Structures as the manual lists them: fields in order with their widths in bits, unnamed ones reserved. Positions
/// follow by adding up, independently of the library's constants.
const std::map<std::string, std::string> kStructures{
    {"qpc",
     "state:4 lag_tx_port_affinity:4 st:8 :3 pm_state:2 :11 :8 pd:24 mtu:3 log_msg_max:5 :1 log_rq_size:4 "
     "log_rq_stride:3 no_sq:1 "
     "log_sq_size:4 :3 ts_format:2 :6 counter_set_id:8 uar_page:24 :8 user_index:24 :3 log_page_size:5 remote_qpn:24 "
     "primary_address_path:352 secondary_address_path:352 log_ack_req_freq:4 :4 log_sra_max:3 :2 retry_count:3 "
     "rnr_retry:3 :13 :32 :8 next_send_psn:24 :8 cqn_snd:24 :8 deth:24 :32 :8 last_acked:24 :8 ssn:24 :8 "
     "log_rra_max:3 :1 atomic_mode:4 rre:1 rwe:1 rae:1 :13 :3 min_rnr_nak:5 next_rcv_psn:24 :8 xrcd:24 :8 cqn_rcv:24 "
     "dbr_addr:64 q_key:32 :5 rq_type:3 srqn:24 :8 rmsn:24 hw_sq_wqebb_counter:16 sw_sq_wqebb_counter:16 hw_rq:32 "
     "sw_rq:32 :32 :16 cs_req:8 cs_res:8 dc_access_key:64 :3 dbr_umem_valid:1 :28 :128 dbr_umem_id:32"},
    {"ads",
     "fl:1 free_ar:1 :14 pkey_index:16 :8 grh:1 mlid:7 rlid:16 ack_timeout:5 :3 src_addr_index:8 :4 stat_rate:4 "
     "hop_limit:8 :4 tclass:8 flow_label:20 rgid_rip:128 :4 f_dscp:1 f_ecn:1 :1 f_eth_prio:1 ecn:2 dscp:6 udp_sport:16 "
     "dei:1 eth_prio:3 sl:4 vhca_port_num:8 rmac_47_32:16 rmac_31_0:32"},
    {"cqc",
     "status:4 :2 dbr_umem_valid:1 :1 cqe_sz:3 cc:1 :1 break:1 oi:1 period_mode:2 compress:1 mini:2 st:4 :8 "
     "dbr_umem_id:32 :20 page_offset:6 :6 :3 log_cq_size:5 uar_page:24 :4 period:12 max_count:16 :24 c_eqn:8 :3 "
     "log_page_size:5 :24 :32 :32 :32 :32 :32 :64 dbr_addr:64"},
    {"create_cq_in",
     "opcode:16 uid:16 :16 op_mod:16 :64 context:512 cq_umem_offset:64 cq_umem_id:32 cq_umem_valid:1 :31 :1408"},
    {"create_qp_in",
     "opcode:16 uid:16 :16 op_mod:16 :8 qpn:24 :32 opt_param_mask:32 ece:32 context:1856 wq_umem_offset:64 "
     "wq_umem_id:32 wq_umem_valid:1 :31"},
    {"create_qp_out", "status:8 :24 syndrome:32 :8 qpn:24 :32"},
};

/// A field of a structure that begins at `base` of another one.
Field within(std::uint32_t base, Field field) { return {base + field.bit, field.width}; }

std::map<std::string, Field> places(const std::string& structure) {
  std::map<std::string, Field> result;
  std::istringstream words(kStructures.at(structure));
  std::uint32_t bit = 0;
  for (std::string word; words >> word;) {
    const std::size_t colon = word.find(':');
    const auto width = static_cast<std::uint32_t>(std::stoul(word.substr(colon + 1)));
    if (colon > 0) result[word.substr(0, colon)] = {bit, width};
    bit += width;
  }
  result["(end)"] = {bit, 0};
  return result;
}

// ---- What the device gets ----

class DevxTest : public testing::Test {
 protected:
  void SetUp() override {
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
    const Umem umem = device->add_memory({.address = rings_.ring(0), .bytes = rings_.options().bytes()});
    return std::make_unique<DevxQueuePair>(device, rings_, 0, umem, umem, port_offset_);
  }
  std::shared_ptr<DevxDevice> open() {
    const MemoryRange heap{.address = rings_.ring(0), .bytes = 64};  // any
    return std::make_shared<DevxDevice>(std::make_shared<Device>("fake_0", path_, fake_.functions, heap), fake_.mlx5);
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
  const RingMemory rings_{make_host_executor(), {.depth = 1024, .alignment = kRingAlignment}};
  int port_offset_ = 0;
  PathOptions path_;
};

TEST_F(DevxTest, CreationSendsTheseCommands) {
  const auto pair = make();
  ASSERT_EQ(fake_.commands.size(), 5U);
  EXPECT_EQ(fake_.commands[0].opcode(), 0x100);  // general capabilities
  EXPECT_EQ(fake_.commands[0].get(0x30, 16), 0x01U);
  EXPECT_EQ(fake_.commands[1].opcode(), 0x50b);  // a queue pair of verbs: which counters it has
  EXPECT_EQ(fake_.commands[2].opcode(), 0x842);  // whether ports are bonded

  const std::uint64_t completion = 1024 * 64;
  const std::uint64_t record = completion + 128;
  ASSERT_EQ(fake_.registered.size(), 2U);
  EXPECT_EQ(fake_.registered[1].address, rings_.ring(0));
  EXPECT_EQ(fake_.registered[1].bytes, 2 * kRingAlignment);
  EXPECT_EQ(nonzero(fake_.commands[3], "create_cq_in", "cqc"), (Fields{{"opcode", 0x400},
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
  EXPECT_EQ(nonzero(fake_.commands[4], "create_qp_in", "qpc"), (Fields{{"opcode", 0x500},
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

  fake_.port.flags = IBV_QPF_GRH_REQUIRED;
  fake_.commands.clear();
  const auto global = make();
  global->connect(peer);
  Fields path = nonzero(fake_.commands.at(fake_.commands.size() - 2), "create_qp_in", "qpc");
  std::erase_if(path, [](const auto& field) { return !field.first.starts_with("path.") && field.first[0] != 'r'; });
  EXPECT_EQ(path, (Fields{{"remote_qpn", 0x4321},
                          {"path.vhca_port_num", 1},
                          {"path.grh", 1},
                          {"path.src_addr_index", 3},
                          {"path.hop_limit", 64},
                          {"rgid_low", 0x0000ffff0a010002},
                          {"path.rlid", 0x88},
                          {"path.sl", 3},
                          {"path.tclass", 106}}));
}

TEST_F(DevxTest, PortsSayWhereToCountAndWhetherTheyAreBonded) {
  fake_.counter_set = 7;
  EXPECT_EQ(open()->counter_set, 7);
  EXPECT_EQ(open()->bonded_ports, 0);
  fake_.lag_state = 1;
  port_offset_ = 3;
  EXPECT_EQ(open()->bonded_ports, 2);
  const auto pair = make();
  fake_.commands.clear();
  pair->connect(peer_of(*pair));
  const Fields init = nonzero(fake_.commands[0], "create_qp_in", "qpc");
  EXPECT_EQ(init.at("counter_set_id"), 7U);
  EXPECT_EQ(init.at("lag_tx_port_affinity"), 2U) << "1 + 3 % 2";
  fake_.port_select_mode = 1;
  EXPECT_EQ(open()->bonded_ports, 0) << "the bond chooses by hash";

  fake_.port_select_mode = 0;
  fake_.firmware_refusals = {{0x50b, {EREMOTEIO, 0x2, 0x99}}, {0x842, {EREMOTEIO, 0x2, 0x99}}};
  EXPECT_EQ(open()->counter_set, 0);
  EXPECT_EQ(open()->bonded_ports, 0);
}

// ---- Refusals ----

TEST_F(DevxTest, EveryCommandThatTheFirmwareRefusesIsNamedWithItsSyndrome) {
  const std::pair<std::uint16_t, std::string> commands[] = {{0x100, "QUERY_HCA_CAP"}, {0x400, "CREATE_CQ"},
                                                            {0x500, "CREATE_QP"},     {0x502, "RST2INIT_QP"},
                                                            {0x503, "INIT2RTR_QP"},   {0x504, "RTR2RTS_QP"}};
  const auto refusal = [&] {
    return message_of<SystemError>([&] {
      const auto pair = make();
      pair->connect(peer_of(*pair));
    });
  };
  for (const auto& [opcode, name] : commands) {
    fake_.firmware_refusals = {{opcode, {EREMOTEIO, 0x3, 0x12ab34}}};
    EXPECT_TRUE(
        says(refusal(), {"RDMA device fake_0: DevX " + name + ": Remote I/O error", "status 0x3, syndrome 0x12ab34"}));
    EXPECT_EQ(fake_.alive, 0) << name;
  }
  // Drivers before Linux 5.19 answer success and leave the refusal to the mailbox.
  fake_.firmware_refusals = {{0x502, {0, 0x4, 0x99}}};
  EXPECT_TRUE(says(refusal(), {"RST2INIT_QP", "status 0x4, syndrome 0x99"}));
  const auto pair = make();
  fake_.firmware_refusals = {{0x50b, {EPERM, 0, 0}}};
  EXPECT_TRUE(says(message_of<SystemError>([&] { pair->trouble(0, 0); }),
                   {"QUERY_QP: Operation not permitted", "DevX is refused"}));
}

TEST_F(DevxTest, DevicesThatCannotServeAreRefusedFirst) {
  fake_.completion_version = 0;
  EXPECT_TRUE(says(message_of<SystemError>([&] { make(); }), {"completion entries of version 0"}));
}

TEST_F(DevxTest, DoorbellRegistersAreTriedFromBestToWorst) {
  const auto taken = [&] {
    make();
    return *std::find_if(fake_.calls.rbegin(), fake_.calls.rend(),
                         [](const std::string& call) { return call.starts_with("alloc_uar"); });
  };
  EXPECT_EQ(taken(), "alloc_uar NC");
  fake_.refusals["alloc_uar NC"] = ENOMEM;
  EXPECT_EQ(taken(), "alloc_uar BF");
  fake_.refusals["alloc_uar BF"] = EPERM;
  EXPECT_TRUE(says(message_of<SystemError>([&] { make(); }),
                   {"fake_0: mlx5dv_devx_alloc_uar", "uncached register: Cannot allocate memory",
                    "write-combining register: Operation not permitted"}));
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
