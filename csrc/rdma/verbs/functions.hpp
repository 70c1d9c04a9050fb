// The functions of libibverbs and libmlx5 as tables of pointers. Nothing links with either: the tables are filled when
// RDMA is first needed, and tests fill them with functions of their own.
#pragma once

#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>

namespace deep_ep::rdma::verbs {

/// Pointers marked "or null" came after rdma-core 28 or are missing in some builds; whoever calls them has a fallback.
struct VerbsFunctions {
  decltype(&::ibv_get_device_list) get_device_list;
  decltype(&::ibv_free_device_list) free_device_list;
  decltype(&::ibv_get_device_name) get_device_name;
  decltype(&::ibv_open_device) open_device;
  decltype(&::ibv_close_device) close_device;
  decltype(&::ibv_query_device) query_device;
  decltype(&::ibv_query_port) query_port;  ///< fills only the old fields; see query_port() below
  decltype(&::ibv_query_gid) query_gid;
  decltype(&::ibv_alloc_pd) alloc_pd;
  decltype(&::ibv_dealloc_pd) dealloc_pd;
  decltype(&::ibv_reg_mr) reg_mr;
  decltype(&::ibv_reg_mr_iova2) reg_mr_iova2;    ///< or null: then memory is addressed by its own address only
  decltype(&::ibv_reg_dmabuf_mr) reg_dmabuf_mr;  ///< or null: then peer memory
  decltype(&::ibv_dereg_mr) dereg_mr;
  decltype(&::ibv_create_cq) create_cq;
  decltype(&::ibv_destroy_cq) destroy_cq;
  decltype(&::ibv_create_qp) create_qp;
  decltype(&::ibv_modify_qp) modify_qp;
  decltype(&::ibv_query_qp) query_qp;
  decltype(&::ibv_destroy_qp) destroy_qp;
  decltype(&::ibv_create_ah) create_ah;
  decltype(&::ibv_destroy_ah) destroy_ah;
  decltype(&::ibv_get_async_event) get_async_event;
  decltype(&::ibv_ack_async_event) ack_async_event;
  decltype(&::ibv_event_type_str) event_type_str;
  decltype(&::ibv_wc_status_str) wc_status_str;
};

/// The newest one needed is mlx5dv_devx_umem_reg_ex of rdma-core 35; later ones may be null.
struct Mlx5Functions {
  decltype(&::mlx5dv_is_supported) is_supported;
  decltype(&::mlx5dv_init_obj) init_obj;
  decltype(&::mlx5dv_devx_general_cmd) general_cmd;
  decltype(&::mlx5dv_devx_obj_create) obj_create;
  decltype(&::mlx5dv_devx_obj_modify) obj_modify;
  decltype(&::mlx5dv_devx_obj_query) obj_query;
  decltype(&::mlx5dv_devx_obj_destroy) obj_destroy;
  decltype(&::mlx5dv_devx_qp_query) qp_query;  ///< or null: no counters
  decltype(&::mlx5dv_devx_umem_reg_ex) umem_reg_ex;
  decltype(&::mlx5dv_devx_umem_dereg) umem_dereg;
  decltype(&::mlx5dv_devx_alloc_uar) alloc_uar;
  decltype(&::mlx5dv_devx_free_uar) free_uar;
  decltype(&::mlx5dv_devx_query_eqn) query_eqn;
  decltype(&::mlx5dv_devx_create_event_channel) create_event_channel;
  decltype(&::mlx5dv_devx_destroy_event_channel) destroy_event_channel;
  decltype(&::mlx5dv_devx_subscribe_devx_event) subscribe_event;
  decltype(&::mlx5dv_devx_get_event) get_event;
  // Of rdma-core 54, so in no header that may be older; or null: no NIC has a data-direct function.
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd* domain, std::uint64_t offset, std::size_t bytes, std::uint64_t first_address,
                           int descriptor, int access, int mlx5_access);
  int (*get_data_direct_sysfs_path)(ibv_context* context, char* path, std::size_t bytes);
};
/// Of reg_dmabuf_mr's `mlx5_access`: by the data-direct function (MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT).
constexpr int kAccessDataDirect = 1;

/// The tables of the libraries on this machine, loaded at the first call. SystemError: the machine lacks them, with
/// what to install.
const VerbsFunctions& verbs_functions();
const Mlx5Functions& mlx5_functions();

/// ibv_query_port as the header's inline function does it: through the context where the provider fills all fields.
int query_port(const VerbsFunctions& functions, ibv_context* context, int port, ibv_port_attr* attributes);

}  // namespace deep_ep::rdma::verbs
