// DevX commands as an mlx5 device would get them: every field of every mailbox, in order, and what each refusal
// becomes.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <regex>
#include <set>
#include <sstream>

#include "csrc/rdma/verbs/devx/devx_queue_pair.hpp"
#include "deep_ep/error.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/rdma/verbs/fake_verbs.hpp"

namespace deep_ep::rdma::verbs::devx {
namespace {

using rdma::test::message_of;
using rdma::test::says;
using test::FakeVerbs;

// ---- Where fields lie ----

// Structures as the manual lists them: fields in order with their widths in bits, unnamed ones reserved. Positions
// follow by adding up, independently of the library's constants.
const std::map<std::string, std::string> kStructures{
    {"qpc",
     "state:4 lag:4 st:8 :3 pm_state:2 :11 :8 pd:24 mtu:3 log_msg_max:5 :1 log_rq_size:4 log_rq_stride:3 no_sq:1 "
     "log_sq_size:4 :3 ts_format:2 :6 counter_set:8 uar_page:24 :8 user_index:24 :3 log_page_size:5 remote_qpn:24 "
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

struct Named {
  std::string structure;
  std::string name;
  Field field;
};

std::vector<Named> library_fields() {
  namespace l = layout;
  return {{"qpc", "state", l::qpc::state},
          {"qpc", "st", l::qpc::st},
          {"qpc", "pm_state", l::qpc::pm_state},
          {"qpc", "pd", l::qpc::pd},
          {"qpc", "mtu", l::qpc::mtu},
          {"qpc", "log_msg_max", l::qpc::log_msg_max},
          {"qpc", "log_rq_size", l::qpc::log_rq_size},
          {"qpc", "log_sq_size", l::qpc::log_sq_size},
          {"qpc", "ts_format", l::qpc::ts_format},
          {"qpc", "uar_page", l::qpc::uar_page},
          {"qpc", "user_index", l::qpc::user_index},
          {"qpc", "log_page_size", l::qpc::log_page_size},
          {"qpc", "remote_qpn", l::qpc::remote_qpn},
          {"qpc", "primary_address_path", {l::qpc::primary_address_path, 352}},
          {"qpc", "log_ack_req_freq", l::qpc::log_ack_req_freq},
          {"qpc", "log_sra_max", l::qpc::log_sra_max},
          {"qpc", "retry_count", l::qpc::retry_count},
          {"qpc", "rnr_retry", l::qpc::rnr_retry},
          {"qpc", "next_send_psn", l::qpc::next_send_psn},
          {"qpc", "cqn_snd", l::qpc::cqn_snd},
          {"qpc", "log_rra_max", l::qpc::log_rra_max},
          {"qpc", "atomic_mode", l::qpc::atomic_mode},
          {"qpc", "rre", l::qpc::rre},
          {"qpc", "rwe", l::qpc::rwe},
          {"qpc", "rae", l::qpc::rae},
          {"qpc", "min_rnr_nak", l::qpc::min_rnr_nak},
          {"qpc", "next_rcv_psn", l::qpc::next_rcv_psn},
          {"qpc", "cqn_rcv", l::qpc::cqn_rcv},
          {"qpc", "dbr_addr", l::qpc::dbr_addr},
          {"qpc", "rq_type", l::qpc::rq_type},
          {"qpc", "hw_sq_wqebb_counter", l::qpc::hw_sq_wqebb_counter},
          {"qpc", "sw_sq_wqebb_counter", l::qpc::sw_sq_wqebb_counter},
          {"qpc", "cs_req", l::qpc::cs_req},
          {"qpc", "cs_res", l::qpc::cs_res},
          {"qpc", "dbr_umem_valid", l::qpc::dbr_umem_valid},
          {"qpc", "dbr_umem_id", l::qpc::dbr_umem_id},
          {"ads", "pkey_index", l::ads::pkey_index},
          {"ads", "grh", l::ads::grh},
          {"ads", "mlid", l::ads::mlid},
          {"ads", "rlid", l::ads::rlid},
          {"ads", "ack_timeout", l::ads::ack_timeout},
          {"ads", "src_addr_index", l::ads::src_addr_index},
          {"ads", "hop_limit", l::ads::hop_limit},
          {"ads", "tclass", l::ads::tclass},
          {"ads", "rgid_rip", {l::ads::rgid_rip, 128}},
          {"ads", "dscp", l::ads::dscp},
          {"ads", "udp_sport", l::ads::udp_sport},
          {"ads", "eth_prio", l::ads::eth_prio},
          {"ads", "sl", l::ads::sl},
          {"ads", "vhca_port_num", l::ads::vhca_port_num},
          {"ads", "rmac_47_32", l::ads::rmac_47_32},
          {"ads", "rmac_31_0", l::ads::rmac_31_0},
          {"cqc", "dbr_umem_valid", l::cqc::dbr_umem_valid},
          {"cqc", "cqe_sz", l::cqc::cqe_sz},
          {"cqc", "cc", l::cqc::cc},
          {"cqc", "oi", l::cqc::oi},
          {"cqc", "dbr_umem_id", l::cqc::dbr_umem_id},
          {"cqc", "log_cq_size", l::cqc::log_cq_size},
          {"cqc", "uar_page", l::cqc::uar_page},
          {"cqc", "c_eqn", l::cqc::c_eqn},
          {"cqc", "log_page_size", l::cqc::log_page_size},
          {"cqc", "dbr_addr", l::cqc::dbr_addr},
          {"create_cq_in", "opcode", l::command::opcode},
          {"create_cq_in", "op_mod", l::command::op_mod},
          {"create_cq_in", "context", {l::create_cq::context, 512}},
          {"create_cq_in", "cq_umem_offset", l::create_cq::cq_umem_offset},
          {"create_cq_in", "cq_umem_id", l::create_cq::cq_umem_id},
          {"create_cq_in", "cq_umem_valid", l::create_cq::cq_umem_valid},
          {"create_qp_in", "qpn", l::queue_pair::qpn},
          {"create_qp_in", "context", {l::queue_pair::context, 1856}},
          {"create_qp_in", "wq_umem_offset", l::queue_pair::wq_umem_offset},
          {"create_qp_in", "wq_umem_id", l::queue_pair::wq_umem_id},
          {"create_qp_in", "wq_umem_valid", l::queue_pair::wq_umem_valid},
          {"create_qp_out", "status", l::answer::status},
          {"create_qp_out", "syndrome", l::answer::syndrome},
          {"create_qp_out", "qpn", l::answer::number}};
}

TEST(DevxLayout, PlacesFollowFromTheOrderOfTheFields) {
  for (const Named& named : library_fields()) {
    const auto found = places(named.structure);
    ASSERT_TRUE(found.contains(named.name)) << named.structure << '.' << named.name;
    EXPECT_EQ(named.field.bit, found.at(named.name).bit) << named.structure << '.' << named.name;
    EXPECT_EQ(named.field.width, found.at(named.name).width) << named.structure << '.' << named.name;
  }
  EXPECT_EQ(places("create_cq_in").at("(end)").bit, layout::command::context_bits);
  EXPECT_EQ(places("create_qp_in").at("(end)").bit, layout::command::context_bits);
  EXPECT_EQ(places("create_qp_out").at("(end)").bit, layout::answer::short_bits);
}

/// Structures of the kernel's mlx5_ifc.h: "u8 name[0x18];", "u8 name[16][0x8];", "struct mlx5_ifc_x_bits name;".
class KernelHeader {
 public:
  explicit KernelHeader(const std::filesystem::path& file) {
    std::ifstream stream(file);
    const std::regex begin(R"(^struct mlx5_ifc_(\w+)_bits \{)");
    const std::regex bits(R"(^\s*u8\s+(\w+)\[(\w+)\](?:\[(\w+)\])?;)");
    const std::regex inner(R"(^\s*struct mlx5_ifc_(\w+)_bits\s+(\w+);)");
    std::string structure;
    std::smatch match;
    for (std::string line; std::getline(stream, line);) {
      if (std::regex_search(line, match, begin)) {
        structure = match[1];
        end_ = 0;
      } else if (line.starts_with("};")) {
        sizes_[structure] = end_;
        structure.clear();  // What follows may be a union or an enumeration.
      } else if (std::regex_search(line, match, bits)) {
        const std::uint32_t width = number(match[2]) * (match[3].matched ? number(match[3]) : 1);
        add(structure, match[1], width);
      } else if (std::regex_search(line, match, inner)) {
        const auto size = sizes_.find(match[1]);
        if (size != sizes_.end()) add(structure, match[2], size->second);
      }
    }
  }

  const std::map<std::string, Field>& fields(const std::string& structure) const { return fields_.at(structure); }

 private:
  static std::uint32_t number(const std::string& text) {
    return static_cast<std::uint32_t>(std::stoul(text, nullptr, 0));
  }
  void add(const std::string& structure, const std::string& name, std::uint32_t width) {
    if (structure.empty()) return;
    fields_[structure][name] = {end_, width};
    end_ += width;
  }

  std::uint32_t end_ = 0;
  std::map<std::string, std::uint32_t> sizes_;
  std::map<std::string, std::map<std::string, Field>> fields_;
};

std::filesystem::path kernel_header() {
  const std::filesystem::path sources =
      std::filesystem::path(__FILE__).parent_path() / "../../../../build/rxe-kernel/usr/src";
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(sources, none)) {
    const auto file = entry.path() / "include/linux/mlx5/mlx5_ifc.h";
    if (std::filesystem::exists(file)) return file;
  }
  return {};
}

TEST(DevxLayout, PlacesAreThoseOfTheKernelsHeader) {
  const std::filesystem::path file = kernel_header();
  if (file.empty()) GTEST_SKIP() << "no kernel headers in build/rxe-kernel (scripts/setup --rxe brings them)";
  const KernelHeader header(file);
  // Fields that only user space sets, which are reserved in the kernel's file; and names that differ.
  const std::set<std::string> users{"dbr_umem_id",    "cq_umem_offset", "cq_umem_id",
                                    "wq_umem_offset", "wq_umem_id",     "c_eqn"};
  const std::map<std::string, std::string> other_names{
      {"create_cq_in.context", "cq_context"}, {"create_qp_in.context", "qpc"}, {"create_qp_in.qpn", "input_qpn"}};
  std::size_t compared = 0;
  for (const Named& named : library_fields()) {
    if (users.contains(named.name)) continue;
    const auto renamed = other_names.find(named.structure + "." + named.name);
    const std::string name = renamed != other_names.end() ? renamed->second : named.name;
    const auto& fields = header.fields(named.structure);
    ASSERT_TRUE(fields.contains(name)) << named.structure << '.' << name;
    EXPECT_EQ(named.field.bit, fields.at(name).bit) << named.structure << '.' << name;
    EXPECT_EQ(named.field.width, fields.at(name).width) << named.structure << '.' << name;
    ++compared;
  }
  EXPECT_GT(compared, 60U);
  namespace l = layout;
  const auto& general = header.fields("cmd_hca_cap");
  EXPECT_EQ(general.at("cqe_version").bit, l::cmd_hca_cap::cqe_version.bit);
  EXPECT_EQ(general.at("log_bf_reg_size").bit, l::cmd_hca_cap::log_bf_reg_size.bit);
  EXPECT_EQ(general.at("log_max_ra_req_qp").bit, l::cmd_hca_cap::log_max_ra_req_qp.bit);
  EXPECT_EQ(general.at("log_max_ra_res_qp").bit, l::cmd_hca_cap::log_max_ra_res_qp.bit);
  EXPECT_EQ(header.fields("atomic_caps").at("atomic_operations").bit, l::atomic_caps::atomic_operations.bit);
  EXPECT_EQ(header.fields("atomic_caps").at("atomic_size_qp").bit, l::atomic_caps::atomic_size_qp.bit);
}

TEST(DevxMailbox, BitsAreCountedFromTheMostSignificant) {
  Mailbox mailbox(128);
  mailbox.set({0x13, 2}, 3).set({0x28, 24}, 0x123456).set({0x40, 64}, 0x0102030405060708);
  const auto* bytes = static_cast<const std::uint8_t*>(mailbox.data());
  EXPECT_EQ(std::vector<std::uint8_t>(bytes, bytes + 16),
            (std::vector<std::uint8_t>{0, 0, 0x18, 0, 0, 0x12, 0x34, 0x56, 1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(mailbox.get({0x28, 24}), 0x123456U);
  mailbox.set({0x28, 24}, 1);
  EXPECT_EQ(mailbox.get({0x28, 24}), 1U);
  EXPECT_THROW(mailbox.set({0x13, 2}, 4), std::logic_error);
  EXPECT_THROW(mailbox.set({0x70, 32}, 0), std::logic_error);
}

TEST(DevxCommands, UdpSourcePortsSpreadAndStayInTheirRange) {
  std::set<std::uint16_t> ports;
  for (std::uint32_t i = 0; i < 1000; ++i) ports.insert(udp_source_port(0x100 + i, 0x900));
  EXPECT_GE(*ports.begin(), 0xc000);
  EXPECT_GT(ports.size(), 900U);
}

// ---- What the device gets ----

class DevxTest : public testing::Test {
 protected:
  static constexpr std::size_t kAlignment = 65536;

  void SetUp() override {
    options_.layout = QueuePairLayout::of(1024);
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, options_.layout.bytes)));
    options_.memory = memory_.get();
    options_.user_index = 5;
    path_.gid_index = 3;
    path_.service_level = 3;
    path_.traffic_class = 106;
  }
  void TearDown() override { EXPECT_EQ(fake_.alive, 0) << "something was not given back"; }

  std::unique_ptr<DevxQueuePair> make() {
    return std::make_unique<DevxQueuePair>(Device::open("fake_0", fake_.functions), fake_.mlx5, options_, path_);
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
  DevxQueuePairOptions options_;
  PathOptions path_;
};

TEST_F(DevxTest, CreationSendsTheseCommands) {
  const auto pair = make();
  ASSERT_EQ(fake_.commands.size(), 4U);
  EXPECT_EQ(fake_.commands[0].opcode(), 0x100);  // general capabilities
  EXPECT_EQ(fake_.commands[0].get(0x30, 16), 0x01U);
  EXPECT_EQ(fake_.commands[1].opcode(), 0x100);  // atomic capabilities
  EXPECT_EQ(fake_.commands[1].get(0x30, 16), 0x07U);

  const std::uint64_t completion = 1024 * 64;
  const std::uint64_t record = completion + 128;
  ASSERT_EQ(fake_.registered.size(), 1U);
  EXPECT_EQ(fake_.registered[0].address, memory_.get());
  EXPECT_EQ(fake_.registered[0].bytes, 2 * kAlignment);
  EXPECT_EQ(nonzero(fake_.commands[2], "create_cq_in", "cqc"), (Fields{{"opcode", 0x400},
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
  EXPECT_EQ(nonzero(fake_.commands[3], "create_qp_in", "qpc"), (Fields{{"opcode", 0x500},
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
                                                                       {"user_index", 5},
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
                                                                       {"rre", 1},
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
                                                                       {"path.sl", 3},
                                                                       {"path.tclass", 106}}));
}

TEST_F(DevxTest, ProgressTellsPostedFromFetched) {
  const auto pair = make();
  fake_.commands.clear();
  fake_.queue_pair_state = 6;
  const QueuePairProgress progress = pair->progress();
  EXPECT_EQ(progress.state, QueuePairState::error);
  EXPECT_EQ(progress.posted, 42);
  EXPECT_EQ(progress.fetched, 41);
  pair->fail_on_purpose();
  ASSERT_EQ(fake_.commands.size(), 2U);
  EXPECT_EQ(fake_.commands[0].opcode(), 0x50b);
  EXPECT_EQ(fake_.commands[1].opcode(), 0x507);
  for (const auto& command : fake_.commands) EXPECT_EQ(command.get(0x48, 24), 0x1234U);
}

TEST_F(DevxTest, EndsInTheOppositeOrder) {
  make();
  const std::vector<std::string> last(fake_.calls.end() - 4, fake_.calls.end());
  EXPECT_EQ(last, (std::vector<std::string>{"destroy QP", "destroy CQ", "free_uar", "umem_dereg"}));
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
  fake_.firmware_refusals.clear();
  const auto pair = make();
  const QueuePairAddress peer = peer_of(*pair);
  const std::map<std::uint16_t, std::string> transitions{
      {0x502, "RST2INIT_QP"}, {0x503, "INIT2RTR_QP"}, {0x504, "RTR2RTS_QP"}};
  for (const auto& [opcode, name] : transitions) {
    fake_.firmware_refusals = {{opcode, {EREMOTEIO, 0x9, 0x77}}};
    EXPECT_TRUE(
        says(message_of<SystemError>([&] { pair->connect(peer); }), {"DevX " + name, "status 0x9, syndrome 0x77"}));
  }
  // Drivers before Linux 5.19 answer success and leave the refusal to the mailbox.
  fake_.firmware_refusals = {{0x507, {0, 0x4, 0x99}}};
  EXPECT_TRUE(
      says(message_of<SystemError>([&] { pair->fail_on_purpose(); }), {"2ERR_QP", "status 0x4, syndrome 0x99"}));
  fake_.firmware_refusals = {{0x50b, {EINVAL, 0, 0}}};
  EXPECT_TRUE(says(message_of<SystemError>([&] { pair->progress(); }), {"QUERY_QP: Invalid argument"}));
  fake_.firmware_refusals = {{0x507, {EPERM, 0, 0}}};
  EXPECT_TRUE(says(message_of<SystemError>([&] { pair->fail_on_purpose(); }), {"DevX is refused"}));
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
}

TEST_F(DevxTest, DoorbellRegistersAreTriedFromBestToWorst) {
  EXPECT_EQ(make()->doorbell().kind(), DoorbellPage::Kind::own_register);
  fake_.refusals["alloc_uar dedicated"] = EOPNOTSUPP;
  EXPECT_EQ(make()->doorbell().kind(), DoorbellPage::Kind::shared_register);
  fake_.refusals["alloc_uar NC"] = ENOMEM;
  EXPECT_EQ(make()->doorbell().kind(), DoorbellPage::Kind::write_combining);
  fake_.refusals["alloc_uar BF"] = EPERM;
  EXPECT_TRUE(says(message_of<SystemError>([&] { make(); }),
                   {"fake_0: mlx5dv_devx_alloc_uar", "own register: Operation not supported",
                    "shared register: Cannot allocate memory", "write-combining register: Operation not permitted"}));
}

TEST_F(DevxTest, RingsInGpuMemoryGoByDmaBufThenByPeerMemory) {
  options_.gpu_memory = true;
  options_.exporter = [](void*, std::size_t) { return UniqueFd(::open("/dev/null", O_RDONLY)); };
  EXPECT_EQ(make()->memory_path(), RegistrationPath::dma_buf);
  EXPECT_EQ(fake_.registered.back().address, nullptr) << "an offset into the dma-buf";
  const auto create_cq = std::find_if(fake_.commands.begin(), fake_.commands.end(),
                                      [](const auto& command) { return command.opcode() == 0x400; });
  EXPECT_EQ(nonzero(*create_cq, "create_cq_in", "cqc").at("log_page_size"), 4U) << "64 KiB";
  fake_.refusals["umem_reg_ex"] = EINVAL;
  EXPECT_EQ(make()->memory_path(), RegistrationPath::peer_memory);
  fake_.refusals["umem_reg"] = EFAULT;
  EXPECT_TRUE(says(message_of<SystemError>([&] { make(); }),
                   {"128.00 KiB of GPU memory", "dma-buf (needs Linux 6.1 or later): mlx5dv_devx_umem_reg_ex: Invalid",
                    "peer memory: mlx5dv_devx_umem_reg: Bad address"}));
  fake_.mlx5.umem_reg_ex = nullptr;
  EXPECT_TRUE(says(message_of<SystemError>([&] { make(); }), {"libmlx5 has no mlx5dv_devx_umem_reg_ex"}));
}

TEST_F(DevxTest, OtherRefusalsOfTheSetUp) {
  fake_.refusals = {{"umem_reg", ENOMEM}};
  EXPECT_TRUE(says(message_of<SystemError>([&] { make(); }), {"mlx5dv_devx_umem_reg of 128.00 KiB of CPU memory"}));
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

TEST_F(DevxTest, MemoryAndDepthOutOfRange) {
  for (const std::uint32_t depth : {0U, 32U, 100U, 65536U}) {
    EXPECT_TRUE(says(message_of<InvalidArgument>([&] { QueuePairLayout::of(depth); }),
                     {"queue pair depth " + std::to_string(depth), "powers of two from 64 to 32768"}));
  }
  options_.memory = memory_.get() + 4096;
  EXPECT_TRUE(says(message_of<InvalidArgument>([&] { make(); }), {"multiples of 64 KiB"}));
}

}  // namespace
}  // namespace deep_ep::rdma::verbs::devx
