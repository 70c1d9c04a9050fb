// The checks of `deep_ep doctor`. Each reads the machine's files and the variables it is given, nothing else, so tests
// examine machines that exist only as files.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "csrc/rdma/discovery/nic_map.hpp"
#include "csrc/rdma/discovery/nics.hpp"
#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/topology/gpus.hpp"
#include "csrc/topology/system_root.hpp"
#include "tools/doctor/report.hpp"

namespace deep_ep::tools {

/// A machine, read once.
struct Patient {
  topology::SystemRoot root;
  deep_ep::environment::Source environment;
  std::vector<environment::Unknown> unknown_variables;
  std::vector<topology::Gpu> gpus;
  std::vector<rdma::Nic> nics;
  rdma::RdmaSettings settings;
  rdma::NicMap map;
  std::string refused;  ///< a wrong variable of the library's own: settings are the defaults then
};
/// `names`: of the variables that are set.
Patient examine(topology::SystemRoot root, environment::Source variables, const std::vector<std::string>& names);

/// Devices and ports: driver, state, device file, GIDs.
void check_nics(const Patient& patient, Findings& findings);
/// The GPU→NIC map, what shares a NIC, what is far from it, and CUDA_VISIBLE_DEVICES.
void check_map(const Patient& patient, Findings& findings);
/// How the NIC reaches GPU memory: dma-buf, peer memory, and how much memory may be pinned.
void check_registration(const Patient& patient, Findings& findings);
/// Whether a GPU may ring a NIC's doorbell: driver option, privileges, driver version.
void check_doorbell(const Patient& patient, Findings& findings);
/// Copies of libibverbs and libmlx5, and whether those that load fit together.
void check_libraries(const Patient& patient, Findings& findings);
/// Variables of this library and of others: which are in effect, which are not, which are harmful.
void check_variables(const Patient& patient, Findings& findings);

Findings check_everything(const Patient& patient);

/// What this process may do; nothing if /proc/self/status does not say.
struct Privileges {
  bool ipc_lock = false;   ///< CAP_IPC_LOCK: pins memory beyond the limit
  bool sys_rawio = false;  ///< CAP_SYS_RAWIO
  bool sys_admin = false;  ///< CAP_SYS_ADMIN: what "privileged" containers have
};
std::optional<Privileges> read_privileges(const topology::SystemRoot& root);

/// One copy of a library in a folder where the loader looks, or might after a change of LD_LIBRARY_PATH.
struct LibraryCopy {
  std::string folder;
  std::string file;            ///< "libibverbs.so.1.14.50.0", links followed
  std::string private_abi;     ///< "34" of IBVERBS_PRIVATE_34: both libraries must have the same
  std::string provider_files;  ///< libibverbs: ".../libibverbs/lib%s-rdmav34.so", where it looks for drivers
  bool searched = false;       ///< the loader looks here with the variables as they are
};
/// All copies of `name` ("libibverbs.so.1"), in the order of the search.
std::vector<LibraryCopy> find_library(const Patient& patient, const std::string& name);

}  // namespace deep_ep::tools
