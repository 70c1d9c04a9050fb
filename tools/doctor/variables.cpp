// `deep_ep doctor`: environment variables that users of other libraries have set, and what becomes of them here.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/bootstrap/interfaces.hpp"
#include "deep_ep/error.hpp"
#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

struct Known {
  const char* name;
  Verdict verdict;
  const char* meaning;
  const char* action;
};

constexpr const char* kUnset = "unset it, unless another library needs it";

// Those that are in effect are in RdmaSettings::taken; these are the rest.
constexpr std::array kKnown = {
    Known{"NVSHMEM_HCA_PE_MAPPING", Verdict::note,
          "no effect: GPUs and NICs are paired by their position in the machine",
          "set DEEP_EP_DEVICE_TO_HCA_MAPPING if the pairing is not the one you want"},
    Known{"NVSHMEM_ENABLE_NIC_PE_MAPPING", Verdict::note,
          "no effect: GPUs and NICs are paired by their position in the machine", kUnset},
    Known{"NVSHMEM_HCA_PREFIX", Verdict::note, "no effect: NICs are known by their driver, not by their name", kUnset},
    Known{"NVSHMEM_REMOTE_TRANSPORT", Verdict::note,
          "no effect: there is one transport between machines, the library's own", kUnset},
    Known{"NVSHMEM_IB_ENABLE_IBGDA", Verdict::note, "no effect: GPUs ring doorbells where they can",
          "DEEP_EP_NIC_HANDLER"},
    Known{"NVSHMEM_IBGDA_NUM_RC_PER_PE", Verdict::note, "no effect: the number of queue pairs is an argument of Buffer",
          "num_qps_per_rank"},
    Known{"NVSHMEM_IBGDA_NUM_DCI", Verdict::note, "no effect: reliable connections are used, not the DC transport",
          kUnset},
    Known{"NCCL_IB_QPS_PER_CONNECTION", Verdict::note, "no effect: the number of queue pairs is an argument of Buffer",
          "num_qps_per_rank"},
    Known{"NVSHMEM_DISABLE_CUDA_VMM", Verdict::note, "no effect: memory of either kind is registered", kUnset},
    Known{"NVSHMEM_SYMMETRIC_SIZE", Verdict::note, "no effect: buffers have the size that they are made with", kUnset},
    Known{"NVSHMEM_MAX_TEAMS", Verdict::note, "no effect", kUnset},
    Known{"NVSHMEM_IBGDA_SUPPORT", Verdict::note, "no effect: an option of NVSHMEM's build", kUnset},
    Known{"NVSHMEM_USE_GDRCOPY", Verdict::note, "no effect: GDRCopy is not used", kUnset},
    Known{"NVSHMEM_DISABLED_GDRCOPY", Verdict::note,
          "no effect anywhere: NVSHMEM's name for it is NVSHMEM_DISABLE_GDRCOPY", "unset it"},
    Known{"NVSHMEM_DISABLE_GDRCOPY", Verdict::note, "no effect: GDRCopy is not used", kUnset},
    Known{"USE_NVPEERMEM", Verdict::note, "no effect: peer memory is used where dma-buf does not work", kUnset},
    Known{"TORCH_CUDA_ARCH_LIST_B200", Verdict::note, "no effect", kUnset},
    Known{"NCCL_NET", Verdict::note, "NCCL's traffic only", ""},
    Known{"NCCL_IB_ADAPTIVE_ROUTING", Verdict::note, "NCCL's traffic only: here the fabric's own setting holds", ""},
    Known{"NCCL_IB_FIFO_TC", Verdict::note, "NCCL's traffic only", ""},
    Known{"NCCL_CROSS_NIC", Verdict::note, "NCCL's traffic only", ""},
    Known{"NCCL_IB_MERGE_NICS", Verdict::note, "NCCL's traffic only", ""},
    Known{"LD_PRELOAD", Verdict::warning, "other libraries are put in front of those the program was built with",
          "this library needs no preloading: unset it unless you know why it is there"},
};

/// Several that mean nothing here, for one reason.
struct Group {
  const char* meaning;
  std::array<std::string_view, 12> names;  ///< unused places are empty
};

constexpr std::array kGroups = {
    Group{"not read: they are about NCCL's own kernels, which are not used, and number what depends on NCCL's release; "
          "whether a GPU can ring is tried here (DEEP_EP_NIC_HANDLER)",
          {"NCCL_GIN_TYPE", "NCCL_GIN_ENABLE", "EP_DISABLE_GIN"}},
    Group{"not read: DEEP_EP_HEAP decides how GPUs share memory",
          {"NCCL_CUMEM_ENABLE", "NVSHMEM_CUMEM_HANDLE_TYPE", "NVSHMEM_CUMEM_GRANULARITY"}},
    Group{"not read: PyTorch's RPC alone uses TensorPipe; for this library DEEP_EP_SOCKET_IFNAME",
          {"TP_SOCKET_IFNAME"}},
    Group{"not read: DEEP_EP_DATA_DIRECT=on lets NICs reach GPU memory by their data-direct function",
          {"NCCL_IB_DATA_DIRECT"}},
    Group{"NCCL's traffic only",
          {"NCCL_NVLS_ENABLE", "NCCL_TUNER_CONFIG_PATH", "NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE",
           "NCCL_TUNER_PLUGIN", "NCCL_NET_PLUGIN", "NCCL_P2P_NET_CHUNKSIZE", "NCCL_NVLS_CHUNKSIZE", "NCCL_PXN_C2C"}},
    Group{"not read: DEEP_EP_LOG and DEEP_EP_LOG_FILE are for the whole library",
          {"NVSHMEM_DEBUG_SUBSYS", "NVSHMEM_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"}},
    Group{"not read: there are no NVTX ranges", {"NVSHMEM_NVTX"}},
    Group{"not needed: every call is checked always", {"NVSHMEM_ENABLE_ERROR_CHECKS"}},
    Group{"an option of DeepEP: nothing is compiled at run time here, and there is no such limit",
          {"EP_JIT_CACHE_DIR", "EP_NCCL_ROOT_DIR", "EP_NVSHMEM_ROOT_DIR", "EP_NUM_TOPK_IDX_BITS", "TOPK_IDX_BITS",
           "EP_REUSE_NCCL_COMM", "EP_NUM_MAX_LOCAL_RANKS", "DISABLE_SM90_FEATURES", "DISABLE_AGGRESSIVE_PTX_INSTRS"}},
    Group{"the engine's own",
          {"VLLM_ALL2ALL_BACKEND", "VLLM_DEEPEP_LOW_LATENCY_ALLOW_NVLINK", "VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL",
           "VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE"}},
    Group{"the engine's own; deep_ep size says what it costs", {"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"}},
    Group{"libibverbs' own", {"RDMAV_FORK_SAFE", "RDMAV_HUGEPAGES_SAFE"}},
    Group{"CUDA's own: calls that wait for another rank hold up the host, so ranks in one process block each other",
          {"CUDA_LAUNCH_BLOCKING"}},
    Group{"CUDA's own", {"CUDA_DEVICE_MAX_CONNECTIONS"}},
};

void check_groups(const Patient& patient, Findings& findings) {
  for (const Group& group : kGroups) {
    for (const std::string_view name : group.names) {
      const auto value = name.empty() ? std::nullopt : patient.environment(name);
      if (!value) continue;
      findings.push_back({"variables", Verdict::note, fmt::format("{}={}", name, *value), group.meaning, ""});
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

/// Those that this machine's RDMA does not need, too: some run may. Texts are judged by whoever parses them.
void check_own(const Patient& patient, Findings& findings) {
  for (const environment::Variable& variable : environment::variables()) {
    try {
      environment::Reader(patient.environment).value(variable.name());
    } catch (const InvalidArgument& error) {
      if (error.what() == patient.refused) continue;  // said already
      findings.push_back(
          {"variables", Verdict::error, error.what(), "what reads it refuses to start", "correct or unset it"});
    }
  }
}

void warn_of_missing(Findings& findings, const std::string& variable, const char* kind,
                     const std::vector<std::string>& missing, const std::vector<std::string>& there) {
  if (missing.empty()) return;
  findings.push_back({"variables", Verdict::warning,
                      fmt::format("{}: there is no {} {}", variable, kind, fmt::join(missing, ", ")),
                      "whoever set it meant another machine, or another name",
                      there.empty() ? fmt::format("correct or unset it: there is no {} at all", kind)
                                    : fmt::format("correct or unset it; there are {}", fmt::join(there, ", "))});
}

/// Names in lists of NICs and of network interfaces.
void check_listed_devices(const Patient& patient, Findings& findings) {
  if (const rdma::NicFilter& filter = patient.settings.nics; filter.is_set()) {
    std::vector<std::string> nics;
    for (const rdma::Nic& nic : patient.nics) nics.push_back(nic.name);
    warn_of_missing(findings, fmt::format("{}={}", filter.source(), filter.text()), "NIC", filter.without_match(nics),
                    nics);
  }
  const std::vector<std::string> interfaces = patient.root.list("/sys/class/net");
  environment::Reader reader(patient.environment);
  try {
    std::string variable;
    const auto filter = reader.read("DEEP_EP_SOCKET_IFNAME", [&](const environment::Value& value) {
      variable = fmt::format("{}={}", value.name, value.text);
      return InterfaceFilter(value.text, value.name == "GLOO_SOCKET_IFNAME");
    });
    if (!filter || interfaces.empty()) return;  // no sysfs: nothing is known of interfaces
    warn_of_missing(findings, variable, "interface", filter->without_match(interfaces), interfaces);
  } catch (const InvalidArgument& error) {
    findings.push_back(
        {"variables", Verdict::error, error.what(), "what reads it refuses to start", "correct or unset it"});
  }
}

/// Those of other libraries that are in effect here: what RDMA reads, and the rest of the table.
std::vector<std::string> taken_variables(const Patient& patient) {
  std::vector<std::string> taken = patient.settings.taken;
  for (const char* name : {"DEEP_EP_NVLINK", "DEEP_EP_MNNVL", "DEEP_EP_SOCKET_IFNAME", "DEEP_EP_SOCKET_FAMILY"}) {
    environment::Reader reader(patient.environment);
    try {
      reader.value(name);
    } catch (const InvalidArgument&) {
      continue;  // check_own() says it
    }
    taken.insert(taken.end(), reader.taken().begin(), reader.taken().end());
  }
  return taken;
}

}  // namespace

void check_variables(const Patient& patient, Findings& findings) {
  if (!patient.refused.empty()) {
    findings.push_back({"variables", Verdict::error, patient.refused,
                        "every call that needs RDMA fails with this text; the rest of this report ignores it",
                        "correct the variable, or unset it: the map is then found automatically"});
  }
  check_own(patient, findings);
  for (const environment::Unknown& unknown : patient.unknown_variables) {
    findings.push_back({"variables", Verdict::warning,
                        fmt::format("{} is set, but there is no such variable", unknown.name), "nothing reads it",
                        fmt::format("did you mean {}? See deep_ep env", unknown.nearest)});
  }
  for (const std::string& taken : taken_variables(patient)) {
    findings.push_back({"variables", Verdict::note, taken, "in effect here too; a DEEP_EP_ variable would win", ""});
  }
  for (const Known& known : kKnown) {
    if (const auto value = patient.environment(known.name)) {
      findings.push_back(
          {"variables", known.verdict, fmt::format("{}={}", known.name, *value), known.meaning, known.action});
    }
  }
  check_groups(patient, findings);
  check_folders(patient, findings);
  check_listed_devices(patient, findings);
  check_nonblocking(patient, findings);
}

}  // namespace deep_ep::tools
