// `deep_ep doctor`: NVLinks, where the driver was asked: how many are up, which GPUs reach which, and the domain of
// several machines that they belong to.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

void check_links(const std::vector<LiveGpu>& gpus, int most, Findings& findings) {
  std::string fewer;
  for (const LiveGpu& gpu : gpus) {
    if (gpu.links == most) continue;
    fewer += fmt::format("{}{} has {}", fewer.empty() ? "" : ", ", gpu.pci, gpu.links);
  }
  findings.push_back({"nvlink", fewer.empty() ? Verdict::ok : Verdict::error,
                      fewer.empty() ? fmt::format("{} NVLinks of each GPU are up", most)
                                    : fmt::format("{} NVLinks of a GPU are up, but {}", most, fewer),
                      fewer.empty() ? "" : "ranks of these GPUs are slower, or cannot reach the others",
                      fewer.empty() ? "" : "dmesg (Xid 74); reset the GPU, then the fabric manager; drain the node"});
}

/// GPUs of machines with NVSwitches register with a fabric, and each reaches all others. Bridges join a few GPUs, and
/// those that they do not join are not broken.
bool has_switches(const std::vector<LiveGpu>& gpus) {
  return std::ranges::any_of(gpus, [&](const LiveGpu& gpu) {
    const bool registers = gpu.fabric && gpu.fabric->state != NvLinkFabric::State::not_supported;
    const auto reached = std::ranges::count(gpu.reaches, std::optional<bool>(true));
    return registers || (gpus.size() > 2 && static_cast<std::size_t>(reached) + 1 == gpus.size());
  });
}

void check_pairs(const std::vector<LiveGpu>& gpus, Findings& findings) {
  const NvLinkPairs pairs = count_pairs(gpus);
  if (pairs.known == 0) return;
  if (pairs.missing.empty()) {
    findings.push_back({"nvlink_pairs", Verdict::ok,
                        fmt::format("all {} pairs of {} GPUs reach each other by NVLink", pairs.known, gpus.size()), "",
                        ""});
    return;
  }
  constexpr std::size_t kMost = 8;
  const std::size_t named = std::min(pairs.missing.size(), kMost);
  findings.push_back(
      {"nvlink_pairs", has_switches(gpus) ? Verdict::error : Verdict::warning,
       fmt::format("{} of {} pairs of GPUs do not reach each other by NVLink: {}{}", pairs.missing.size(), pairs.known,
                   fmt::join(pairs.missing.begin(), pairs.missing.begin() + static_cast<std::ptrdiff_t>(named), ", "),
                   named < pairs.missing.size() ? ", ..." : ""),
       "one NVLink domain of all ranks cannot be made: they use PCIe, or a buffer refuses to start",
       "on machines with NVSwitches, nvidia-fabricmanager of the driver's release; with bridges, only the ranks of "
       "bridged GPUs in one buffer"});
}

void check_fabric(const std::vector<LiveGpu>& gpus, Findings& findings) {
  using State = NvLinkFabric::State;
  std::set<std::string> domains;
  std::vector<std::string> waiting;
  std::vector<std::string> slow;
  bool known = false;
  for (const LiveGpu& gpu : gpus) {
    if (!gpu.fabric || gpu.fabric->state == State::not_supported) continue;
    known = true;
    if (gpu.fabric->state != State::completed || gpu.fabric->error != 0) {
      waiting.push_back(gpu.fabric->error == 0 ? gpu.pci : fmt::format("{} (error {})", gpu.pci, gpu.fabric->error));
    } else {
      domains.insert(gpu.fabric->text());
    }
    if (gpu.fabric->slow_links) slow.push_back(gpu.pci);
  }
  if (!known) return;
  if (!waiting.empty()) {
    findings.push_back({"nvlink_domain", Verdict::error,
                        fmt::format("not registered with the NVLink fabric: {}", fmt::join(waiting, ", ")),
                        "CUDA does not start on these GPUs, or they reach no other one",
                        "systemctl status nvidia-fabricmanager (nvidia-imex between machines); nvidia-smi -q shows "
                        "the state under Fabric"});
  }
  if (!slow.empty()) {
    findings.push_back({"nvlink_domain", Verdict::warning,
                        fmt::format("the NVLink bandwidth of {} is degraded", fmt::join(slow, ", ")),
                        "all ranks wait for these GPUs", "dmesg (Xid 74, SXid); drain the node"});
  }
  if (domains.size() > 1) {
    findings.push_back(
        {"nvlink_domain", Verdict::error,
         fmt::format("GPUs of this machine are in {} NVLink domains: {}", domains.size(), fmt::join(domains, "; ")),
         "GPUs of different cliques do not reach each other by NVLink",
         "the partition of the fabric must hold whole machines"});
  } else if (domains.size() == 1 && !domains.begin()->empty()) {
    findings.push_back({"nvlink_domain", Verdict::ok, fmt::format("NVLink domain {}", *domains.begin()),
                        "ranks of all machines of this clique reach each other by NVLink (DEEP_EP_HEAP=fabric, auto)",
                        ""});
  }
}

char mark_of(const std::vector<std::optional<bool>>& reaches, std::size_t to) {
  if (to >= reaches.size() || !reaches[to].has_value()) return '?';
  return *reaches[to] ? '+' : '-';
}

}  // namespace

NvLinkPairs count_pairs(const std::vector<LiveGpu>& gpus) {
  NvLinkPairs pairs;
  for (std::size_t a = 0; a < gpus.size(); ++a) {
    for (std::size_t b = a + 1; b < gpus.size(); ++b) {
      const char there = mark_of(gpus[a].reaches, b);
      const char back = mark_of(gpus[b].reaches, a);
      if (there == '?' && back == '?') continue;
      ++pairs.known;
      if (there == '-' || back == '-') pairs.missing.push_back(fmt::format("{}-{}", a, b));
    }
  }
  return pairs;
}

std::string nvlink_table(const std::vector<LiveGpu>& gpus) {
  if (count_pairs(gpus).known == 0) return {};
  std::string text = "\nNVLink between GPUs (+ reached, - not reached, ? not known)\n     ";
  for (std::size_t to = 0; to < gpus.size(); ++to) text += fmt::format(" {:>2}", to);
  text += '\n';
  for (std::size_t from = 0; from < gpus.size(); ++from) {
    text += fmt::format("  {:>2} ", from);
    for (std::size_t to = 0; to < gpus.size(); ++to) {
      text += fmt::format("  {}", from == to ? '.' : mark_of(gpus[from].reaches, to));
    }
    text += '\n';
  }
  return text;
}

void check_nvlink(const Patient& patient, Findings& findings) {
  if (!patient.live_gpus || patient.live_gpus->empty()) return;
  const std::vector<LiveGpu>& gpus = *patient.live_gpus;
  int most = 0;
  for (const LiveGpu& gpu : gpus) most = std::max(most, gpu.links);
  if (most == 0) {
    if (gpus.size() > 1) {
      findings.push_back(
          {"nvlink", Verdict::warning, "no GPU has an NVLink that is up",
           "GPUs of this machine reach each other by PCIe, if at all",
           "nvidia-smi nvlink -s; on machines with NVSwitches, start nvidia-fabricmanager of the driver's "
           "release"});
    }
  } else {
    check_links(gpus, most, findings);
    check_pairs(gpus, findings);
  }
  check_fabric(gpus, findings);
}

}  // namespace deep_ep::tools
