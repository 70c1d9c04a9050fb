// Places of the fields in mailboxes, against the order of the fields and against the kernel's header.
#include "csrc/rdma/verbs/devx/layout.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "csrc/rdma/verbs/devx/commands.hpp"
#include "tests/rdma/verbs/devx/structures.hpp"

namespace deep_ep::rdma::verbs::devx {
namespace {

struct Named {
  std::string structure;
  std::string name;
  Field field;
};

std::vector<Named> library_fields() {
  namespace l = layout;
  return {{"qpc", "state", l::qpc::state},
          {"qpc", "lag_tx_port_affinity", l::qpc::lag_tx_port_affinity},
          {"qpc", "st", l::qpc::st},
          {"qpc", "counter_set_id", l::qpc::counter_set_id},
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
  EXPECT_EQ(general.at("num_lag_ports").bit, l::cmd_hca_cap::num_lag_ports.bit);
  EXPECT_EQ(general.at("log_max_ra_req_qp").bit, l::cmd_hca_cap::log_max_ra_req_qp.bit);
  EXPECT_EQ(general.at("log_max_ra_res_qp").bit, l::cmd_hca_cap::log_max_ra_res_qp.bit);
  constexpr std::uint32_t kLag = 0x40;  // where QUERY_LAG's answer has it
  EXPECT_EQ(kLag + header.fields("lagc").at("port_select_mode").bit, l::query_lag::port_select_mode.bit);
  EXPECT_EQ(kLag + header.fields("lagc").at("lag_state").bit, l::query_lag::lag_state.bit);
  EXPECT_EQ(header.fields("atomic_caps").at("atomic_req_8B_endianness_mode").bit,
            l::atomic_caps::atomic_req_8b_endianness_mode.bit);
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

}  // namespace
}  // namespace deep_ep::rdma::verbs::devx
