// `deep_ep doctor`: GPUs and their driver.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <set>
#include <string>

#include "csrc/executor/driver_version.hpp"
#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

constexpr int kHopper = 90;

/// Facts by the names of GPUs: files of a machine say nothing else about what a GPU can do.
struct GpuModel {
  std::string_view word;    ///< of its name
  int capability = 0;       ///< compute capability, 100 for 10.0
  bool multi_node = false;  ///< its NVLink may join several nodes
};
constexpr GpuModel kModels[] = {
    {"GB300", 103, true}, {"GB200", 100, true}, {"GH200", 90, true}, {"B300", 103}, {"B200", 100}, {"H200", 90},
    {"H100", 90},         {"H800", 90},         {"H20", 90},         {"A100", 80},  {"A800", 80},  {"L40S", 89},
    {"L40", 89},          {"L4", 89},           {"V100", 70},        {"T4", 75},
};

/// Null for names that are not in the table. "A100-SXM4" is an A100, "GB200" no B200.
const GpuModel* model_of(std::string_view name) {
  const auto ends = [&](std::size_t at) {
    return at >= name.size() || std::isalnum(static_cast<unsigned char>(name[at])) == 0;
  };
  for (const GpuModel& model : kModels) {
    const std::size_t at = name.find(model.word);
    if (at != std::string_view::npos && (at == 0 || ends(at - 1)) && ends(at + model.word.size())) return &model;
  }
  return nullptr;
}

std::string capability_text(int capability) { return fmt::format("{}.{}", capability / 10, capability % 10); }

// Machine code that this GPU loads, or PTX that the driver translates for it.
enum class Code : std::uint8_t { none, translated, loads };

Code code_for(const BuiltFor& build, int capability) {
  Code best = Code::none;
  for (const std::string& architecture : build.architectures) {
    const int number = major_of(architecture);
    const std::size_t end = std::to_string(number).size();
    // Code of "90a" runs on 9.0 alone, PTX of "90a" as well. Machine code of "100" or "100f" runs on what has the same
    // major number and no smaller minor one, and plain PTX on everything later.
    const char suffix = end < architecture.size() ? architecture[end] : '-';
    const bool here = suffix == 'a' ? number == capability : number <= capability && number / 10 == capability / 10;
    if (here && !architecture.ends_with("-virtual")) best = Code::loads;
    const bool ptx = !architecture.ends_with("-real");
    const bool plain = suffix != 'a' && suffix != 'f';
    if (ptx && plain && number <= capability) best = std::max(best, Code::translated);
  }
  return best;
}

void check_code(const Patient& patient, const std::string& name, const GpuModel& model, Findings& findings) {
  if (model.capability < kHopper) {
    findings.push_back({"driver", Verdict::error,
                        fmt::format("{} has compute capability {}", name, capability_text(model.capability)),
                        "the kernels need 9.0 (Hopper) or later; on this machine ranks can only run on the CPU",
                        "use machines with H100, H200, B200 or later"});
    return;
  }
  if (patient.build.cuda.empty()) return;
  const Code code = code_for(patient.build, model.capability);
  if (code == Code::loads) return;
  findings.push_back({"driver", code == Code::none ? Verdict::error : Verdict::note,
                      fmt::format("this build has {} {} (compute capability {}), only for {}",
                                  code == Code::none ? "no code for" : "no code of its own for", name,
                                  capability_text(model.capability), fmt::join(patient.build.architectures, ", ")),
                      code == Code::none
                          ? "kernels do not load: \"no kernel image is available\""
                          : "the driver translates the kernels when they are first used, which takes a while",
                      code == Code::none ? "a build with -D CMAKE_CUDA_ARCHITECTURES of this GPU" : ""});
}

std::set<std::string> names_of(const Patient& patient) {
  std::set<std::string> names;
  for (const topology::Gpu& gpu : patient.gpus) {
    if (!gpu.model.empty()) names.insert(gpu.model);
  }
  return names;
}

void check_multi_node(const Patient& patient, Findings& findings) {
  const std::set<std::string> names = names_of(patient);
  const bool multi_node = std::ranges::any_of(names, [](const std::string& name) {
    const GpuModel* model = model_of(name);
    return model != nullptr && model->multi_node;
  });
  if (!multi_node) return;
  const std::string folder = "/dev/nvidia-caps-imex-channels";
  const auto channels = patient.root.list(folder);
  if (!channels.empty()) {
    findings.push_back({"imex", Verdict::ok,
                        fmt::format("{} IMEX channels, first {}/{}", channels.size(), folder, channels[0]),
                        "memory can be shared by NVLink between nodes of one domain"});
    return;
  }
  findings.push_back(
      {"imex", Verdict::warning, fmt::format("{} is missing or empty", folder),
       "NVLink joins several nodes here, but memory cannot be shared over it: NICs carry that traffic",
       "start nvidia-imex on all nodes, and give the container a channel (in Kubernetes a ComputeDomain)"});
}

}  // namespace

void check_driver(const Patient& patient, Findings& findings) {
  const std::string driver = patient.root.text("/sys/module/nvidia/version");
  if (patient.gpus.empty()) return;
  const std::size_t before = findings.size();
  if (driver.empty()) {
    findings.push_back({"driver", Verdict::warning, "the version of NVIDIA's driver is not known",
                        "/sys/module/nvidia/version is missing", "is the driver loaded? nvidia-smi must work"});
    return;
  }
  // A driver that is too old for a GPU does not run it, so that GPU is not among the names.
  const int least = patient.build.cuda.empty() ? 0 : cuda::first_driver_of_cuda(major_of(patient.build.cuda));
  for (const std::string& name : names_of(patient)) {
    if (const GpuModel* model = model_of(name)) check_code(patient, name, *model, findings);
  }
  if (major_of(driver) < least) {
    findings.push_back(
        {"driver", Verdict::error,
         fmt::format("driver {} is older than {}, the first for CUDA {}", driver, least, patient.build.cuda),
         "CUDA does not start, or kernels do not load", "update the driver"});
  }
  if (findings.size() != before) return;
  findings.push_back({"driver", Verdict::ok, fmt::format("driver {}", driver),
                      patient.build.cuda.empty() ? "this build has no CUDA: ranks run on the CPU here"
                                                 : fmt::format("this build is of CUDA {} for {}", patient.build.cuda,
                                                               fmt::join(patient.build.architectures, ", "))});
}

void check_gpus(const Patient& patient, Findings& findings) {
  if (patient.gpus.empty()) {
    findings.push_back({"gpu", Verdict::note, "there is no NVIDIA GPU (or no driver for it)",
                        "ranks run on the CPU; each takes a NIC in turn"});
    return;
  }
  const std::set<std::string> names = names_of(patient);
  const auto ours = std::ranges::count_if(patient.gpus, [](const auto& gpu) { return gpu.cuda_id.has_value(); });
  findings.push_back({"gpu", names.size() > 1 ? Verdict::warning : Verdict::ok,
                      fmt::format("{} GPU{} ({}){}", ours, ours == 1 ? "" : "s",
                                  names.empty() ? "model not known" : fmt::format("{}", fmt::join(names, ", ")),
                                  static_cast<std::size_t>(ours) == patient.gpus.size()
                                      ? ""
                                      : fmt::format("; {} more belong to other containers",
                                                    patient.gpus.size() - static_cast<std::size_t>(ours))),
                      names.size() > 1 ? "ranks wait for the slowest GPU" : ""});
  check_multi_node(patient, findings);
}

}  // namespace deep_ep::tools
