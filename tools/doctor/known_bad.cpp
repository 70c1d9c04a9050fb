// `deep_ep doctor`: releases that others have had trouble with.
#include <fmt/format.h>

#include <charconv>
#include <compare>
#include <string>
#include <string_view>

#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

struct Release {
  int major = 0;
  int minor = 0;
  auto operator<=>(const Release&) const = default;  // NOLINT(modernize-use-nullptr): a false alarm
};

Release parse_release(std::string_view text) {
  Release release;
  const char* end = text.data() + text.size();
  const auto major = std::from_chars(text.data(), end, release.major);
  if (major.ptr != end && *major.ptr == '.') std::from_chars(major.ptr + 1, end, release.minor);
  return release;
}

constexpr Release kAny{};

/// What has the release: each is a file of the machine.
struct KnownSubject {
  const char* name;
  const char* file;
};
constexpr KnownSubject kKernel = {"kernel", "/proc/sys/kernel/osrelease"};
constexpr KnownSubject kDriver = {"NVIDIA driver", "/sys/module/nvidia/version"};
constexpr KnownSubject kOfed = {"OFED (mlx5_core)",
                                "/sys/module/mlx5_core/version"};  // the kernel's own has no version

/// From `first` up to, but not including, `fixed` (any later one, where that is 0.0).
struct KnownBad {
  KnownSubject subject;
  Release first;
  Release fixed;
  const char* only_with_gpu;  ///< a part of the model's name; empty: any
  Verdict verdict;
  const char* meaning;
  const char* action;
  const char* link;
};

constexpr KnownBad kKnownBad[] = {
    {kKernel,
     {1, 0},
     {6, 1},
     "",
     Verdict::note,
     "queues of NICs cannot lie in GPU memory by dma-buf: the peer memory module is needed for that, or they lie in "
     "host "
     "memory",
     "Linux 6.1 or later",
     "https://docs.kernel.org/driver-api/dma-buf.html"},
    {kOfed,
     {24, 10},
     {24, 11},
     "",
     Verdict::note,
     "NCCL's GPU-initiated networking asserts on it; this library does not use that",
     "nothing for this library",
     "https://github.com/deepseek-ai/DeepEP/issues/680"},
    {kOfed,
     {25, 4},
     {25, 7},
     "",
     Verdict::note,
     "the kernel modules of DOCA 3.0 do not build on Linux 6.14 (ipsec.c)",
     "DOCA 3.2.1 or later, or the kernel's own driver",
     "https://docs.nvidia.com/doca/sdk/"},
    {kDriver,
     {580, 0},
     {581, 0},
     "H200",
     Verdict::note,
     "reported to crash DeepEP's high-throughput kernels on GKE with H200; this library has kernels of its own",
     "nothing for this library, if the tests of its own pass (deep_ep bench intranode --check)",
     "https://github.com/llm-d/llm-d"},
    {kDriver,
     {1, 0},
     {510, 40},
     "",
     Verdict::warning,
     "GPUs cannot ring doorbells of NICs",
     "a driver of 570 or later",
     "https://docs.nvidia.com/datacenter/tesla/drivers/"},
};

bool has_gpu(const Patient& patient, std::string_view word) {
  if (word.empty()) return true;
  for (const topology::Gpu& gpu : patient.gpus) {
    if (gpu.model.find(word) != std::string::npos) return true;
  }
  return false;
}

}  // namespace

void check_known_bad(const Patient& patient, Findings& findings) {
  if (patient.nics.empty() && patient.gpus.empty()) return;
  const std::size_t before = findings.size();
  for (const KnownBad& bad : kKnownBad) {
    const std::string version = patient.root.read(bad.subject.file).value_or("");
    const Release release = parse_release(version);
    if (release == kAny || release < bad.first || (bad.fixed != kAny && release >= bad.fixed)) continue;
    if (!has_gpu(patient, bad.only_with_gpu)) continue;
    findings.push_back({"known_bad", bad.verdict, fmt::format("{} {}", bad.subject.name, version),
                        fmt::format("{} ({})", bad.meaning, bad.link), bad.action});
  }
  if (findings.size() == before) {
    findings.push_back(
        {"known_bad", Verdict::ok, "no release of the kernel, the driver or OFED here is known for trouble", "", ""});
  }
}

void check_compiler(const Patient&, Findings& findings) {
  findings.push_back({"compiler", Verdict::ok, "no compiler is needed: kernels are part of the library", "", ""});
}

}  // namespace deep_ep::tools
