// The functions of libibverbs and libmlx5 as tables of pointers. Nothing links with either: the tables are filled when
// RDMA is first needed, and tests fill them with functions of their own.
#pragma once

#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>

namespace deep_ep::rdma::verbs {

// clang-format off
// The functions of libibverbs, by their names without "ibv_". NEED: every rdma-core from 28 on has them. PREFER: null
// where it has not, and there is a fallback: GPU memory is peer memory.
#define DEEP_EP_VERBS_FUNCTIONS(NEED, PREFER)                                                                \
  NEED(get_device_list) NEED(free_device_list) NEED(get_device_name) NEED(open_device) NEED(close_device)    \
  NEED(query_device) NEED(query_port) NEED(query_gid) NEED(alloc_pd) NEED(dealloc_pd)                        \
  NEED(reg_mr_iova2) PREFER(reg_dmabuf_mr) NEED(dereg_mr) NEED(create_cq) NEED(destroy_cq) NEED(create_qp) \
  NEED(modify_qp) NEED(query_qp) NEED(destroy_qp) NEED(create_ah) NEED(destroy_ah) NEED(get_async_event)     \
  NEED(ack_async_event) NEED(event_type_str) NEED(port_state_str)

// Of libmlx5: NEED and PREFER without "mlx5dv_devx_" (the newest is umem_reg_ex of rdma-core 35; without qp_query there
// are no counters), DIRECT without "mlx5dv_".
#define DEEP_EP_MLX5_FUNCTIONS(DIRECT, NEED, PREFER)                                                          \
  DIRECT(is_supported) DIRECT(init_obj) NEED(general_cmd) NEED(obj_create) NEED(obj_modify) NEED(obj_query)   \
  NEED(obj_destroy) PREFER(qp_query) NEED(umem_reg_ex) NEED(umem_dereg) NEED(alloc_uar) NEED(free_uar)        \
  NEED(query_eqn) NEED(create_event_channel) NEED(destroy_event_channel) NEED(subscribe_devx_event) NEED(get_event)
// clang-format on

#define DEEP_EP_OF_VERBS(name) decltype(&::ibv_##name) name;
#define DEEP_EP_OF_MLX5(name) decltype(&::mlx5dv_##name) name;
#define DEEP_EP_OF_DEVX(name) decltype(&::mlx5dv_devx_##name) name;
struct VerbsFunctions {
  DEEP_EP_VERBS_FUNCTIONS(DEEP_EP_OF_VERBS, DEEP_EP_OF_VERBS)
};
struct Mlx5Functions {
  DEEP_EP_MLX5_FUNCTIONS(DEEP_EP_OF_MLX5, DEEP_EP_OF_DEVX, DEEP_EP_OF_DEVX)
};
#undef DEEP_EP_OF_VERBS
#undef DEEP_EP_OF_MLX5
#undef DEEP_EP_OF_DEVX

/// The tables of the libraries on this machine, loaded at the first call. SystemError: the machine lacks them, with
/// what to install.
const VerbsFunctions& verbs_functions();
const Mlx5Functions& mlx5_functions();

/// ibv_query_port as the header's inline function does it: through the context where the provider fills all fields.
int query_port(const VerbsFunctions& functions, ibv_context* context, int port, ibv_port_attr* attributes);

}  // namespace deep_ep::rdma::verbs
