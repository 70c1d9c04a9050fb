#include "simulation/nic_test/judge.hpp"

#include <algorithm>
#include <optional>

#include "csrc/rdma/ring/failure.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep::rdma::nic_test {
namespace {

constexpr std::uint64_t kWrap = 65536;
constexpr const char* kReport = "make a report with --bundle FILE and attach the file";

struct Advice {
  const char* meaning;
  const char* action;
};

Advice advice_of(Syndrome syndrome) {
  switch (syndrome) {
    case Syndrome::transport_retries_exceeded:
    case Syndrome::receiver_not_ready_retries_exceeded:
      return {"packets do not get through, so no run on several machines will work",
              "check link, GID and routes (deep_ep doctor); on RoCE also the firewall: UDP port 4791"};
    case Syndrome::remote_access:
    case Syndrome::remote_invalid_request:
    case Syndrome::remote_operation:
      return {
          "the NIC that received the operation refused what is right: memory is not registered as it should be",
          "update firmware and driver; try without dma-buf (NVSHMEM_IB_DISABLE_DMABUF=1) and report which one works"};
    case Syndrome::flushed:
      return {"an operation before this one had failed, and its completion was overwritten by this one's",
              "the log in the bundle may have the cause: make a report with --bundle FILE"};
    case Syndrome::none:
      return {"what stands in the completion entry was not written by the NIC, or not as this library reads it",
              kReport};
    default:
      return {"the NIC does not take entries as this library writes them, or cannot read the memory they name",
              kReport};
  }
}

/// Completions and signals that did not come within the time.
Line late(const std::string& name, const Run& run) {
  const FaultRecord& fault = *run.fault;
  if (fault.wanted == Wanted::rdma_completion) {
    return {
        name, Outcome::fail,
        fmt::format("no completion of entry {} within {} s ({} are complete); {}", fault.expected, run.wait_s,
                    fault.seen, run.health),
        "the NIC did not see the doorbell, cannot read the ring, or its completion does not reach the GPU: a run would "
        "wait until its deadline",
        "try DEEP_EP_NIC_HANDLER=cpu: if that works, the GPU's way to the NIC is at fault (PeerMappingOverride, IOMMU, "
        "ACS)"};
  }
  const bool answer = fault.peer % 2 == 0;
  return {name, Outcome::fail,
          fmt::format("{} {} did not come within {} s (it is {}); {}", answer ? "the receiver's answer" : "the signal",
                      fault.expected, answer ? run.wait_s : 2 * run.wait_s, fault.seen, run.health),
          "an addition that was posted is not visible in the memory it went to, or the other side has given up: a run "
          "would wait until its deadline",
          "the other lines, and the other machine's, may have the cause; PCI atomics must be on in the NIC's firmware"};
}

/// The line where a run did not come to its end.
std::optional<Line> broken(const std::string& name, const Run& run) {
  if (!run.fault) return std::nullopt;
  if (run.fault->kind == FaultKind::timeout) return late(name, run);
  const RdmaFailure failure = RdmaFailure::unpack(static_cast<std::uint32_t>(run.fault->field));
  const Advice advice = advice_of(static_cast<Syndrome>(failure.syndrome));
  // Without a syndrome only the kernel knows of a failure.
  const std::string found =
      failure.syndrome != 0 ? run.health : fmt::format("{}; {}", describe_fault(run.rank, *run.fault), run.health);
  return Line{name, Outcome::fail, found, advice.meaning, advice.action};
}

std::string first_wrong(const NicTestResult& seen) {
  constexpr std::uint64_t kSlots = deep_ep::nic_test::kSlots;
  return fmt::format("{} {} wrong, first in round {} that of {} {}: expected {:#x}, found {:#x}", seen.wrong,
                     seen.wrong == 1 ? "word is" : "words are", seen.round, seen.place < kSlots ? "write" : "counter",
                     seen.place % kSlots, seen.expected, seen.found);
}

std::string rate_text(double bytes_per_second) {
  return bytes_per_second < 1e9 ? fmt::format("{:.0f} MB/s", bytes_per_second * 1e-6)
                                : fmt::format("{:.1f} GB/s", bytes_per_second * 1e-9);
}

}  // namespace

Line judge_entries(const std::string& name, const Run& run, bool must_wrap) {
  if (auto line = broken(name, run)) return *line;
  if (run.wrong) {
    return {name, Outcome::fail, first_wrong(*run.wrong),
            "an operation that the NIC calls complete was lost, came twice or went elsewhere: results would be wrong "
            "without any error",
            kReport};
  }
  const bool wrapped = run.operations >= kWrap;
  return {name, must_wrap && !wrapped ? Outcome::skip : Outcome::pass,
          fmt::format("{} entries (writes, fetch-adds) in {:.2f} s, all data is right{}", run.operations, run.seconds,
                      wrapped     ? "; the 16-bit index wrapped"
                      : must_wrap ? "; there was no time for more, so the 16-bit index did not wrap"
                                  : "")};
}

Line judge_litmus(const Run& run) {
  if (auto line = broken("litmus", run)) return *line;
  if (run.wrong) {
    return {
        "litmus", Outcome::fail, fmt::format("the flag was seen before the data: {}", first_wrong(*run.wrong)),
        "signals overtake what they announce: results would be wrong now and then, without any error",
        "look for PCIe relaxed ordering that is forced on (firmware setting PCI_WR_ORDERING, BIOS), and for a GPU with "
        "GPU_DIRECT_RDMA_WRITES_ORDERING 0; then report it with --bundle FILE"};
  }
  return {
      "litmus", Outcome::pass,
      fmt::format("{} rounds of 16 KiB and a flag: the data was always there; {:.1f} us a round, there and back",
                  run.operations, run.seconds * 1e6 / static_cast<double>(std::max<std::uint64_t>(run.operations, 1)))};
}

Line judge_additions(const Run& run) {
  if (auto line = broken("atomics", run)) return *line;
  if (run.wrong) {
    return {"atomics", Outcome::fail,
            fmt::format("the counter is {} after {} additions", run.wrong->found, run.wrong->expected),
            "additions get lost, or are done twice: signals would never reach their value, or reach it too early",
            "PCI atomics must be on in the NIC's firmware, and memory registered with strict ordering; report it with "
            "--bundle FILE"};
  }
  return {"atomics", Outcome::pass,
          fmt::format("{} fetch-adds to one word: {:.0f} a second", run.operations,
                      static_cast<double>(run.operations) / run.seconds)};
}

Line judge_wrong_key(const Run& run) {
  constexpr const char* kName = "wrong_key";
  if (!run.fault) {
    return {kName, Outcome::fail, "a write by a wrong key succeeded",
            "the NIC does not check keys: a stray write would destroy memory without any error", kReport};
  }
  if (run.fault->kind == FaultKind::timeout) return late(kName, run);
  const auto syndrome =
      static_cast<Syndrome>(RdmaFailure::unpack(static_cast<std::uint32_t>(run.fault->field)).syndrome);
  if (syndrome != Syndrome::remote_access) {
    return {
        kName, Outcome::fail,
        fmt::format("a write by a wrong key fails with syndrome {:#04x} ({}), expected {:#04x}",
                    static_cast<unsigned>(syndrome), text(syndrome), static_cast<unsigned>(Syndrome::remote_access)),
        "errors of a run would name a wrong cause",
        syndrome == Syndrome::transport_retries_exceeded ? advice_of(syndrome).action : kReport};
  }
  return {kName, Outcome::pass, "a write by a wrong key fails with syndrome 0x13, as it must"};
}

/// What to do where the rate is low: what is seen to be wrong comes first.
std::string advice_on_rate(const Link& link) {
  if (link.pcie_gbps > 0 && link.pcie_gbps < 0.95 * link.pcie_best_gbps) {
    return fmt::format(
        "PCIe runs at {:.0f} of {:.0f} Gbit/s: the slot is narrower, or the link has come up slow; compare LnkSta with "
        "LnkCap of lspci -vv, and plug the NIC in again or elsewhere",
        link.pcie_gbps, link.pcie_best_gbps);
  }
  if (link.pcie_gbps > 0 && link.pcie_gbps < link.gbps) {
    return fmt::format("PCIe carries {:.0f} Gbit/s, less than the port: this is the most that NIC and slot can do",
                       link.pcie_gbps);
  }
  if (link.interface_mtu > 0 && link.interface_mtu < 4200) {
    return fmt::format(
        "the MTU of the interface is {}, so packets are small: set 9000 (ip link set dev NAME mtu 9000) on all "
        "machines and switches",
        link.interface_mtu);
  }
  if (link.virtual_machine && !link.relaxed_ordering) {
    return "PCIe keeps the order of all that the NIC writes: set DEEP_EP_RDMA_RELAXED_ORDERING=1";
  }
  if (link.virtual_machine) {
    return "the hypervisor's IOMMU translates each access: it needs address translation services (ATS) of the NIC "
           "(mlxconfig ATS_ENABLED=1) and of the switch between NIC and GPU";
  }
  return "GPU and NIC may talk through the CPU: see that the map says PIX or PXB, and turn off ACS redirection and the "
         "IOMMU's translation (iommu=pt); then try DEEP_EP_RDMA_RELAXED_ORDERING=1";
}

Line judge_bandwidth(const std::vector<Run>& runs, const Link& link) {
  constexpr double kEnough = 0.8;
  std::string figures;
  double best = 0;
  for (const Run& run : runs) {
    if (auto line = broken("bandwidth", run)) return *line;
    if (run.wrong) {
      return {"bandwidth", Outcome::fail, fmt::format("with {} queue pairs {}", run.pairs, first_wrong(*run.wrong)),
              "bytes that the NIC calls written are not there: results would be wrong under load", kReport};
    }
    const double bytes_per_second = static_cast<double>(run.bytes) / run.seconds;
    best = std::max(best, bytes_per_second);
    figures += fmt::format("{}{} with {} {}", figures.empty() ? "" : ", ", rate_text(bytes_per_second), run.pairs,
                           run.pairs == 1 ? "queue pair" : "queue pairs");
  }
  if (link.gbps > 0) figures += fmt::format("; the link has {:.1f} GB/s", link.gbps / 8);
  if (!link.is_judged || best >= kEnough * link.gbps / 8 * 1e9) return {"bandwidth", Outcome::pass, figures};
  return {"bandwidth", Outcome::fail, figures, "less than 80 % of the link: calls between nodes are that much slower",
          advice_on_rate(link)};
}

}  // namespace deep_ep::rdma::nic_test
