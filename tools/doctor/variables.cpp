// `deep_ep doctor`: environment variables that users of other libraries have set, and what becomes of them here.
#include <fmt/format.h>

#include <array>

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
    Known{"NVSHMEM_QP_DEPTH", Verdict::note, "no effect: the library knows how deep its rings must be", kUnset},
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

// Folders that scripts export; a wrong one means that the script was written for another place.
constexpr std::array kFolders = {"GDRCOPY_HOME", "NVSHMEM_HOME", "NVSHMEM_DIR", "CUDA_HOME"};

void check_gib(const Patient& patient, Findings& findings) {
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
  for (const std::string& taken : patient.settings.taken) {
    findings.push_back({"variables", Verdict::note, taken, "in effect here too; a DEEP_EP_ variable would win", ""});
  }
  for (const Known& known : kKnown) {
    if (const auto value = patient.environment(known.name)) {
      findings.push_back(
          {"variables", known.verdict, fmt::format("{}={}", known.name, *value), known.meaning, known.action});
    }
  }
  for (const char* name : kFolders) {
    const auto folder = patient.environment(name);
    if (!folder || patient.root.exists(*folder)) continue;
    findings.push_back({"variables", Verdict::warning, fmt::format("{}={}: there is no such folder", name, *folder),
                        "the library does not need it, but what sets it was written for another machine or image",
                        "correct or unset it"});
  }
  check_gib(patient, findings);
}

}  // namespace deep_ep::tools
