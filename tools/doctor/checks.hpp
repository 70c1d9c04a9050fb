// The checks of `deep_ep doctor`. Each reads the machine's files and the variables it is given, nothing else, so tests
// examine machines that exist only as files.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "csrc/rdma/discovery/nic_map.hpp"
#include "csrc/rdma/discovery/nics.hpp"
#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/topology/gpus.hpp"
#include "csrc/topology/system_root.hpp"
#include "tools/common/buffer_sizes.hpp"
#include "tools/doctor/build.hpp"
#include "tools/doctor/nvml.hpp"
#include "tools/doctor/report.hpp"

namespace deep_ep::tools {

/// A machine, read once.
struct Patient {
  topology::SystemRoot root;
  deep_ep::environment::Source environment;
  std::vector<std::string> variable_names;  ///< of those that are set
  std::vector<environment::Unknown> unknown_variables;
  std::vector<topology::Gpu> gpus;
  std::vector<rdma::Nic> nics;
  rdma::RdmaSettings settings;
  rdma::NicMap map;
  BuiltFor build = built_for();
  std::optional<std::vector<LiveGpu>> live_gpus;  ///< where the driver was asked: on this machine, and not in a hurry
  /// Queue pairs that each NIC has, where it was asked: on this machine, and not in a hurry.
  std::map<std::string, std::uint64_t> live_queue_pairs;
  BufferSizes run;      ///< what memory and queues are counted for
  int pid = 0;          ///< of a process whose libraries are looked at; 0: none
  std::string refused;  ///< a wrong variable of the library's own: settings are the defaults then
};
/// `names`: of the variables that are set.
Patient examine(topology::SystemRoot root, environment::Source variables, const std::vector<std::string>& names);

// The checks, by the numbers of all_checks() (catalogue.hpp).

/// D1. Driver against the GPUs and against what this program is built for.
void check_driver(const Patient& patient, Findings& findings);
/// D2. GPUs, NVSwitches, NVLink within and between nodes.
void check_gpus(const Patient& patient, Findings& findings);
void check_nvlink(const Patient& patient, Findings& findings);
/// D3. Locked memory, open files, /dev/shm, huge pages.
void check_limits(const Patient& patient, Findings& findings);
/// D4. Devices and ports: driver, kind, state.
void check_nics(const Patient& patient, Findings& findings);
/// D5. The GID of every port.
void check_gids(const Patient& patient, Findings& findings);
/// D6. The GPU→NIC map, what shares a NIC, what is far from it, and CUDA_VISIBLE_DEVICES.
void check_map(const Patient& patient, Findings& findings);
/// D7. Copies of libibverbs and libmlx5, and whether those that load fit together.
void check_libraries(const Patient& patient, Findings& findings);
/// D8. How the NIC reaches GPU memory: dma-buf, peer memory.
void check_registration(const Patient& patient, Findings& findings);
/// D9. Whether a GPU may ring a NIC's doorbell: driver option, privileges, driver version.
void check_doorbell(const Patient& patient, Findings& findings);
/// D10. Whether this process may open the device files of NICs and GPUs.
void check_device_files(const Patient& patient, Findings& findings);
/// D12. Variables of this library and of others: which are in effect, which are not, which are harmful.
void check_variables(const Patient& patient, Findings& findings);

/// D11. Google's plugin for NCCL, and the pod's RDMA networks.
void check_gke(const Patient& patient, Findings& findings);
/// D13. RANK, WORLD_SIZE, ...: do they fit together, and do they mean nodes or processes?
void check_ranks(const Patient& patient, Findings& findings);
/// D14. Both of these: where ranks meet, and by which clock.
void check_meeting(const Patient& patient, Findings& findings);
/// Does MASTER_ADDR resolve, and answer? Of this machine only; waits for 4 s at most.
void check_master(const Patient& patient, Findings& findings);
/// D17. What NICs have counted since their driver was loaded that should not happen.
void check_counters(const Patient& patient, Findings& findings);
/// D18. Libraries of which the process has two copies.
void check_process(const Patient& patient, Findings& findings);
/// D19. Queue pairs and doorbell pages that the run needs of each NIC.
void check_queues(const Patient& patient, Findings& findings);
/// D20. Buffers of the run against the memory of a GPU.
void check_memory(const Patient& patient, Findings& findings);
/// D21. Where the node is, in the words of the cluster.
void check_node_labels(const Patient& patient, Findings& findings);
/// D23. Nothing is compiled at run time.
void check_compiler(const Patient& patient, Findings& findings);
/// D24. Releases known for trouble.
void check_known_bad(const Patient& patient, Findings& findings);
/// A part of D6: PCIe bridges that redirect what passes between GPU and NIC.
void check_acs(const Patient& patient, Findings& findings);

/// All of them.
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
