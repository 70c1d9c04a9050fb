// The functions of libibverbs and libmlx5 as tables of pointers. Nothing links with either: the tables are filled when
// RDMA is first needed, and tests fill them with functions of their own.
#pragma once

#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>

namespace deep_ep::rdma::verbs {

// clang-format off
// The functions of libibverbs, by their names without "ibv_": every rdma-core from 34 on has them.
#define DEEP_EP_VERBS_FUNCTIONS(OF)                                                                      \
  OF(get_device_list) OF(free_device_list) OF(get_device_name) OF(open_device) OF(close_device)          \
  OF(query_device) OF(query_port) OF(query_gid) OF(alloc_pd) OF(dealloc_pd) OF(reg_mr_iova2)             \
  OF(reg_dmabuf_mr) OF(dereg_mr) OF(create_cq) OF(destroy_cq) OF(create_qp) OF(modify_qp)                \
  OF(destroy_qp) OF(create_ah) OF(destroy_ah) OF(get_async_event) OF(ack_async_event) OF(event_type_str) \
  OF(port_state_str)

// Of libmlx5: DIRECT without "mlx5dv_", OF without "mlx5dv_devx_" (the newest is umem_reg_ex of rdma-core 35).
#define DEEP_EP_MLX5_FUNCTIONS(DIRECT, OF)                                                             \
  DIRECT(init_obj) OF(general_cmd) OF(obj_create) OF(obj_modify)                                       \
  OF(obj_query) OF(obj_destroy) OF(qp_query) OF(umem_reg_ex) OF(umem_dereg) OF(alloc_uar) OF(free_uar) \
  OF(query_eqn)
// clang-format on

#define DEEP_EP_OF_VERBS(name) decltype(&::ibv_##name) name;
#define DEEP_EP_OF_MLX5(name) decltype(&::mlx5dv_##name) name;
#define DEEP_EP_OF_DEVX(name) decltype(&::mlx5dv_devx_##name) name;
struct VerbsFunctions {
  DEEP_EP_VERBS_FUNCTIONS(DEEP_EP_OF_VERBS)
};
struct Mlx5Functions {
  DEEP_EP_MLX5_FUNCTIONS(DEEP_EP_OF_MLX5, DEEP_EP_OF_DEVX)
};
#undef DEEP_EP_OF_VERBS
#undef DEEP_EP_OF_MLX5
#undef DEEP_EP_OF_DEVX

/// The tables of the libraries on this machine, loaded at the first call. SystemError: the machine lacks them, with
/// what to install.
const VerbsFunctions& verbs_functions();
const Mlx5Functions& mlx5_functions();

}  // namespace deep_ep::rdma::verbs
