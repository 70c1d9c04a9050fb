// Where the fields of mlx5 commands lie, found in another way than the library's.
#pragma once

#include <map>
#include <sstream>
#include <string>

#include "csrc/rdma/verbs/devx/layout.hpp"

namespace deep_ep::rdma::verbs::devx {

/// Structures as the manual lists them: fields in order with their widths in bits, unnamed ones reserved. Positions
/// follow by adding up, independently of the library's constants.
inline const std::map<std::string, std::string> kStructures{
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

inline std::map<std::string, Field> places(const std::string& structure) {
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

}  // namespace deep_ep::rdma::verbs::devx
