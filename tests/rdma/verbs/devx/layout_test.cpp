// Places of the fields in mailboxes against the kernel's header.
#include "csrc/rdma/verbs/devx/layout.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "csrc/rdma/verbs/devx/commands.hpp"
#include "tests/rdma/verbs/devx/structures.hpp"

namespace deep_ep::rdma::verbs::devx {
namespace {

/// Fields that the library uses. What it puts into each, devx_queue_pair_test.cpp compares with these places.
const std::map<std::string, std::string> kCompared{
    {"qpc",
     "state lag_tx_port_affinity st counter_set_id pm_state pd mtu log_msg_max log_rq_size log_sq_size ts_format "
     "uar_page user_index log_page_size remote_qpn primary_address_path log_ack_req_freq log_sra_max retry_count "
     "rnr_retry next_send_psn cqn_snd log_rra_max atomic_mode rre rwe rae min_rnr_nak next_rcv_psn cqn_rcv "
     "dbr_addr rq_type hw_sq_wqebb_counter sw_sq_wqebb_counter cs_req cs_res dbr_umem_valid"},
    {"ads",
     "pkey_index grh mlid rlid ack_timeout src_addr_index hop_limit tclass rgid_rip dscp udp_sport eth_prio sl "
     "vhca_port_num rmac_47_32 rmac_31_0"},
    {"cqc", "dbr_umem_valid cqe_sz cc oi log_cq_size uar_page log_page_size dbr_addr"},
    {"create_cq_in", "opcode op_mod context cq_umem_valid"},
    {"create_qp_in", "qpn context wq_umem_valid"},
    {"create_qp_out", "status syndrome qpn"}};

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
  const std::map<std::string, std::string> other_names{
      {"create_cq_in.context", "cq_context"}, {"create_qp_in.context", "qpc"}, {"create_qp_in.qpn", "input_qpn"}};
  for (const auto& [structure, names] : kCompared) {
    std::istringstream words(names);
    for (std::string word; words >> word;) {
      const auto renamed = other_names.find(structure + "." + word);
      const std::string& name = renamed != other_names.end() ? renamed->second : word;
      const auto& fields = header.fields(structure);
      ASSERT_TRUE(fields.contains(name)) << structure << '.' << name;
      EXPECT_EQ(places(structure).at(word).bit, fields.at(name).bit) << structure << '.' << name;
      EXPECT_EQ(places(structure).at(word).width, fields.at(name).width) << structure << '.' << name;
    }
  }
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

}  // namespace
}  // namespace deep_ep::rdma::verbs::devx
