// `deep_ep doctor`: environment variables that users of other libraries have set, and what becomes of them here.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/bootstrap/interfaces.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "tools/common/variables.hpp"
#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

constexpr const char* kUnset = "unset it, unless another library needs it";

// Those that are in effect are in environment::variables(); these are the rest.
constexpr ForeignVariable kForeign[] = {
    {"NVSHMEM_HCA_PE_MAPPING", "no effect: GPUs and NICs are paired by their position in the machine",
     "set DEEP_EP_DEVICE_TO_HCA_MAPPING if the pairing is not the one you want"},
    {"NVSHMEM_ENABLE_NIC_PE_MAPPING", "no effect: GPUs and NICs are paired by their position in the machine", kUnset},
    {"NVSHMEM_HCA_PREFIX", "no effect: NICs are known by their driver, not by their name", kUnset},
    {"NVSHMEM_IB_ADDR_FAMILY NCCL_IB_ADDR_FAMILY NVSHMEM_IB_ADDR_RANGE NCCL_IB_ADDR_RANGE NVSHMEM_IB_ROCE_VERSION_NUM "
     "NCCL_IB_ROCE_VERSION_NUM",
     "no effect: RoCE v2 is used, by an IPv4 address where there is one", "DEEP_EP_RDMA_GID_INDEX"},
    {"NCCL_IB_FIFO_TC NCCL_NET_GDR_LEVEL NCCL_NVLS_ENABLE NCCL_NET NCCL_TUNER_CONFIG_PATH "
     "NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE NCCL_TUNER_PLUGIN NCCL_NET_PLUGIN NCCL_CROSS_NIC "
     "NCCL_P2P_NET_CHUNKSIZE NCCL_NVLS_CHUNKSIZE NCCL_PXN_C2C NCCL_IB_MERGE_NICS",
     "NCCL's traffic only"},
    {"NCCL_IB_QPS_PER_CONNECTION NVSHMEM_IBGDA_NUM_RC_PER_PE",
     "no effect: the number of queue pairs is an argument of Buffer", "num_qps_per_rank"},
    {"NVSHMEM_IBGDA_NUM_DCI", "no effect: reliable connections are used, not the DC transport", kUnset},
    {"NCCL_IB_ADAPTIVE_ROUTING", "NCCL's traffic only: here the fabric's own setting holds"},
    {"NCCL_GIN_TYPE NCCL_GIN_ENABLE EP_DISABLE_GIN",
     "not read: they are about NCCL's own kernels, which are not used, and number what depends on NCCL's release; "
     "whether a GPU can ring is tried here (DEEP_EP_NIC_HANDLER)"},
    {"NVSHMEM_REMOTE_TRANSPORT", "no effect: there is one transport between machines, the library's own", kUnset},
    {"NVSHMEM_IB_ENABLE_IBGDA", "no effect: GPUs ring doorbells where they can", "DEEP_EP_NIC_HANDLER"},
    {"NVSHMEM_DISABLE_CUDA_VMM", "no effect: memory of either kind is registered", kUnset},
    {"NCCL_CUMEM_ENABLE NVSHMEM_CUMEM_HANDLE_TYPE NVSHMEM_CUMEM_GRANULARITY",
     "not read: the library finds out how GPUs can share memory"},
    {"NCCL_IB_DATA_DIRECT", "not read: NICs reach GPU memory by their own function"},
    {"NVSHMEM_SYMMETRIC_SIZE", "no effect: buffers have the size that they are made with", kUnset},
    {"NVSHMEM_MAX_TEAMS TORCH_CUDA_ARCH_LIST_B200", "no effect", kUnset},
    {"NVSHMEM_IBGDA_SUPPORT", "no effect: an option of NVSHMEM's build", kUnset},
    {"NVSHMEM_USE_GDRCOPY NVSHMEM_DISABLE_GDRCOPY", "no effect: GDRCopy is not used", kUnset},
    {"USE_NVPEERMEM", "no effect: peer memory is used where dma-buf does not work", kUnset},
    {"GDRCOPY_HOME NVSHMEM_HOME NVSHMEM_DIR CUDA_HOME", "not needed; the doctor warns where there is no such folder",
     "", Verdict::skip},
    {"NVSHMEM_DISABLED_GDRCOPY", "no effect anywhere: NVSHMEM's name for it is NVSHMEM_DISABLE_GDRCOPY", "unset it"},
    {"TP_SOCKET_IFNAME", "not read: PyTorch's RPC alone uses TensorPipe; for this library DEEP_EP_SOCKET_IFNAME"},
    {"MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK OMPI_COMM_WORLD_RANK"
     " PMI_RANK SLURM_PROCID",
     "read by deep_ep bench, by which ranks find each other", "", Verdict::skip},
    {"NODE_RANK NNODES GPUS_PER_NODE LOCAL_WORLD_SIZE JOB_COMPLETION_INDEX", "a launcher's own", "", Verdict::skip},
    {"CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES CUDA_DEVICE_ORDER",
     "CUDA's own; GPUs are known by PCI address here, never by number", "", Verdict::skip},
    {"CUDA_MODULE_LOADING", "CUDA's own", "", Verdict::skip},
    {"CUDA_LAUNCH_BLOCKING",
     "CUDA's own: calls that wait for another rank hold up the host, so ranks in one process block each other"},
    {"CUDA_DEVICE_MAX_CONNECTIONS", "CUDA's own"},
    {"LD_PRELOAD", "other libraries are put in front of those the program was built with",
     "this library needs no preloading: unset it unless you know why it is there", Verdict::warning},
    {"LD_LIBRARY_PATH", "the loader's own; the doctor says which libibverbs it finds by it", "", Verdict::skip},
    {"RDMAV_DRIVERS IBV_DRIVERS", "libibverbs' own: which drivers it loads", "", Verdict::skip},
    {"RDMAV_FORK_SAFE RDMAV_HUGEPAGES_SAFE", "libibverbs' own"},
    {"TORCH_NCCL_USE_COMM_NONBLOCKING", "PyTorch's own; beside NCCL_NET=gIB the doctor objects, as gIB does", "",
     Verdict::skip},
    {"NVSHMEM_DEBUG_SUBSYS NVSHMEM_DEBUG_FILE NCCL_DEBUG_SUBSYS NCCL_DEBUG_FILE",
     "not read: DEEP_EP_LOG and DEEP_EP_LOG_FILE are for the whole library"},
    {"NVSHMEM_NVTX", "not read: DEEP_EP_NVTX=1 makes NVTX ranges of the calls of the Python package"},
    {"NVSHMEM_ENABLE_ERROR_CHECKS", "not needed: every call is checked always"},
    {"EP_JIT_CACHE_DIR EP_NCCL_ROOT_DIR EP_NVSHMEM_ROOT_DIR EP_NUM_TOPK_IDX_BITS TOPK_IDX_BITS EP_REUSE_NCCL_COMM "
     "EP_NUM_MAX_LOCAL_RANKS DISABLE_SM90_FEATURES DISABLE_AGGRESSIVE_PTX_INSTRS",
     "an option of DeepEP: nothing is compiled at run time here, and there is no such limit"},
    {"VLLM_ALL2ALL_BACKEND VLLM_DEEPEP_LOW_LATENCY_ALLOW_NVLINK VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL "
     "VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE",
     "the engine's own"},
    {"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "the engine's own; deep_ep size says what it costs"},
};

void check_foreign(const Patient& patient, Findings& findings) {
  for (const ForeignVariable& row : kForeign) {
    for (const std::string_view name : split(row.names, ' ')) {
      const auto value = row.verdict == Verdict::skip ? std::nullopt : patient.environment(name);
      if (!value) continue;
      findings.push_back({"variables", row.verdict, fmt::format("{}={}", name, *value), row.meaning, row.action});
    }
  }
}

/// NVSHMEM_HOME, CUDA_HOME, EP_NCCL_ROOT_DIR, ...: a wrong one means that the script was written for another place.
bool names_a_folder(std::string_view name) {
  if (!name.ends_with("_HOME") && !name.ends_with("_DIR")) return false;
  for (const char* word :
       {"CUDA", "NVSHMEM", "GDRCOPY", "NCCL", "DEEPEP", "DEEP_EP", "RDMA", "OFED", "DOCA", "UCX", "GIB"}) {
    if (name.find(word) != std::string_view::npos) return true;
  }
  return false;
}

void check_folders(const Patient& patient, Findings& findings) {
  for (const std::string& name : patient.variable_names) {
    const auto folder = names_a_folder(name) ? patient.environment(name) : std::nullopt;
    if (!folder || !folder->starts_with('/') || patient.root.exists(*folder)) continue;
    findings.push_back({"variables", Verdict::warning, fmt::format("{}={}: there is no such folder", name, *folder),
                        "the library does not need it, but what sets it was written for another machine or image",
                        "correct or unset it"});
  }
}

void check_nonblocking(const Patient& patient, Findings& findings) {
  const auto net = patient.environment("NCCL_NET");
  const auto blocking = patient.environment("TORCH_NCCL_USE_COMM_NONBLOCKING");
  if (net != "gIB" || !blocking) return;
  findings.push_back(
      {"variables", Verdict::error, fmt::format("TORCH_NCCL_USE_COMM_NONBLOCKING={} beside NCCL_NET=gIB", *blocking),
       "gIB refuses to start: \"NCCL/NET (shim) mismatch recommended\"", "unset TORCH_NCCL_USE_COMM_NONBLOCKING"});
}

/// All of the table, also those that this machine's RDMA does not need: some run may.
void check_table(const Patient& patient, Findings& findings) {
  for (const Assignment& row : assignments_of(patient)) {
    if (row.refused()) {
      findings.push_back({"variables", Verdict::error, row.problem,
                          "what reads it refuses to start; the rest of this report ignores it", "correct or unset it"});
    }
    if (row.refused() || row.value.name.empty() || environment::is_own(row.name)) continue;
    findings.push_back({"variables", Verdict::note, fmt::format("{}={}", row.name, row.text),
                        "this library reads it as well; a DEEP_EP_ variable would win"});
  }
}

void warn_of_missing(Findings& findings, const DeviceFilter& filter, const char* kind,
                     const std::vector<std::string>& there) {
  const std::vector<std::string> missing = filter.without_match(there);
  if (missing.empty()) return;
  findings.push_back({"variables", Verdict::warning,
                      fmt::format("{}: there is no {} {}", filter.setting(), kind, fmt::join(missing, ", ")),
                      "whoever set it meant another machine, or another name",
                      there.empty() ? fmt::format("correct or unset it: there is no {} at all", kind)
                                    : fmt::format("correct or unset it; there are {}", fmt::join(there, ", "))});
}

/// Names in lists of NICs and of network interfaces.
void check_listed_devices(const Patient& patient, Findings& findings) {
  std::vector<std::string> nics;
  for (const rdma::Nic& nic : patient.nics) nics.push_back(nic.name);
  warn_of_missing(findings, patient.settings.nics, "NIC", nics);
  const std::vector<std::string> interfaces = patient.root.list("/sys/class/net");
  if (interfaces.empty()) return;  // no sysfs: nothing is known of interfaces
  try {
    environment::Reader reader{patient.environment};
    warn_of_missing(findings, reader.read("DEEP_EP_SOCKET_IFNAME", parse_interfaces), "interface", interfaces);
  } catch (const InvalidArgument&) {  // NOLINT(bugprone-empty-catch): the table's check has said it
  }
}

}  // namespace

std::span<const ForeignVariable> foreign_variables() { return kForeign; }

void check_variables(const Patient& patient, Findings& findings) {
  check_table(patient, findings);
  for (const tools::UnknownVariable& unknown : tools::unknown_of(patient.variable_names)) {
    findings.push_back({"variables", Verdict::warning,
                        fmt::format("{} is set, but there is no such variable", unknown.name), "nothing reads it",
                        fmt::format("did you mean {}? See deep_ep env", unknown.nearest)});
  }
  check_foreign(patient, findings);
  check_folders(patient, findings);
  check_listed_devices(patient, findings);
  check_nonblocking(patient, findings);
}

}  // namespace deep_ep::tools
