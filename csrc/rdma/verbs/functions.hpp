// The functions of libibverbs and libmlx5 as tables of pointers. Nothing links with either: the tables are filled when
// RDMA is first needed, and tests fill them with functions of their own.
#pragma once

#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>

namespace deep_ep::rdma::verbs {

// clang-format off
// The functions of libibverbs: every rdma-core from 34 on has them.
#define DEEP_EP_VERBS_FUNCTIONS(OF)                                                                          \
  OF(ibv_, get_device_list) OF(ibv_, free_device_list) OF(ibv_, get_device_name) OF(ibv_, open_device)       \
  OF(ibv_, close_device) OF(ibv_, query_device) OF(ibv_, query_port) OF(ibv_, query_gid) OF(ibv_, alloc_pd)  \
  OF(ibv_, dealloc_pd) OF(ibv_, reg_mr_iova2) OF(ibv_, reg_dmabuf_mr) OF(ibv_, dereg_mr) OF(ibv_, create_cq) \
  OF(ibv_, destroy_cq) OF(ibv_, create_qp) OF(ibv_, modify_qp) OF(ibv_, destroy_qp) OF(ibv_, create_ah)      \
  OF(ibv_, destroy_ah) OF(ibv_, get_async_event) OF(ibv_, ack_async_event) OF(ibv_, event_type_str)          \
  OF(ibv_, port_state_str)

// Of libmlx5 (the newest is umem_reg_ex of rdma-core 35).
#define DEEP_EP_MLX5_FUNCTIONS(OF)                                                                        \
  OF(mlx5dv_, init_obj) OF(mlx5dv_devx_, general_cmd) OF(mlx5dv_devx_, obj_create)                        \
  OF(mlx5dv_devx_, obj_modify) OF(mlx5dv_devx_, obj_query) OF(mlx5dv_devx_, obj_destroy)                  \
  OF(mlx5dv_devx_, qp_query) OF(mlx5dv_devx_, umem_reg_ex) OF(mlx5dv_devx_, umem_dereg)                   \
  OF(mlx5dv_devx_, alloc_uar) OF(mlx5dv_devx_, free_uar) OF(mlx5dv_devx_, query_eqn)
// clang-format on

#define DEEP_EP_FUNCTION(prefix, name) decltype(&::prefix##name) name;
struct VerbsFunctions {
  DEEP_EP_VERBS_FUNCTIONS(DEEP_EP_FUNCTION)
};
struct Mlx5Functions {
  DEEP_EP_MLX5_FUNCTIONS(DEEP_EP_FUNCTION)
};
#undef DEEP_EP_FUNCTION

/// The tables of the libraries on this machine, loaded at the first call. SystemError: the machine lacks them, with
/// what to install.
const VerbsFunctions& verbs_functions();
const Mlx5Functions& mlx5_functions();

}  // namespace deep_ep::rdma::verbs
