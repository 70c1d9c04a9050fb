#include "tools/doctor/counters.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>
#include <utility>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "tools/common/child.hpp"

namespace deep_ep::tools {
namespace {

struct Counter {
  const char* name;
  const char* file;  ///< below ports/<n>
  std::uint64_t unit;
  const char* trouble;  ///< what it means that this one counts; empty for traffic
};

// InfiniBand counts data in words of four bytes, on Ethernet as well.
constexpr std::array kCounters = {
    Counter{"sent_bytes", "counters/port_xmit_data", 4, ""},
    Counter{"received_bytes", "counters/port_rcv_data", 4, ""},
    Counter{"discarded", "counters/port_xmit_discards", 1, "packets were dropped on their way out"},
    Counter{"received_errors", "counters/port_rcv_errors", 1, "damaged packets arrived: cable or connector"},
    Counter{"overruns", "counters/excessive_buffer_overrun_errors", 1,
            "the port's buffer ran over: flow control fails"},
    Counter{"out_of_sequence", "hw_counters/out_of_sequence", 1, "packets were lost or overtaken in the network"},
    Counter{"sequence_errors", "hw_counters/packet_seq_err", 1, "a peer asked for packets again"},
    Counter{"ack_timeouts", "hw_counters/local_ack_timeout_err", 1, "a peer did not answer in time"},
    Counter{"not_ready_retries", "hw_counters/rnr_nak_retry_err", 1, "a peer was not ready to receive"},
    Counter{"congestion_seen", "hw_counters/np_ecn_marked_roce_packets", 1, "switches marked packets: congestion"},
    Counter{"congestion_reported", "hw_counters/np_cnp_sent", 1, "this port told peers to send more slowly"},
    Counter{"resent_after_timeout", "hw_counters/roce_adp_retrans", 1, "packets were sent again, as no answer came"},
    Counter{"congestion_told", "hw_counters/rp_cnp_handled", 1, "peers told this port to send more slowly"},
};

std::uint64_t value_of(const PortCounters& port, const std::string& name) {
  const auto found = port.values.find(name);
  return found == port.values.end() ? 0 : found->second;
}

std::uint64_t bytes_of(const PortCounters& port) {
  return value_of(port, "sent_bytes") + value_of(port, "received_bytes");
}

// Those of the GPUs that this container may use.
std::set<std::pair<std::string, int>> mapped_ports(const Patient& patient) {
  std::set<std::pair<std::string, int>> ports;
  for (const rdma::NicMapRow& row : patient.map.rows) {
    if (!row.gpu.cuda_id) continue;
    for (const rdma::NicAssignment& nic : row.nics) ports.emplace(nic.nic.name, nic.port.number);
  }
  return ports;
}

void check_balance(const std::vector<const PortCounters*>& ports, Findings& findings) {
  std::uint64_t total = 0;
  std::size_t busy = 0;
  for (const PortCounters* port : ports) {
    total += bytes_of(*port);
    busy += bytes_of(*port) > 0 ? 1 : 0;
  }
  if (total == 0) {
    findings.push_back({"traffic", Verdict::warning, "no NIC carried anything",
                        "the command did not use RDMA: one machine only, or NVLink reached every peer"});
    return;
  }
  const std::uint64_t average = total / ports.size();
  std::vector<std::string> idle;
  for (const PortCounters* port : ports) {
    if (bytes_of(*port) * 2 < average) idle.push_back(fmt::format("{} ({})", port->nic, format_bytes(bytes_of(*port))));
  }
  if (idle.empty()) {
    findings.push_back({"traffic", Verdict::ok,
                        fmt::format("{} NICs carried {} each on average", ports.size(), format_bytes(average))});
    return;
  }
  findings.push_back(
      {"traffic", Verdict::error,
       busy == 1 ? "only one NIC carries traffic"
                 : fmt::format("{} of {} NICs carry less than half of the average", idle.size(), ports.size()),
       fmt::format("the others are the bottleneck, if the command used all GPUs; hardly used: {}",
                   fmt::join(idle, ", ")),
       "compare with the map above; if a mapping variable is set, unset it. The command's own log says which NIC each "
       "rank takes (DEEP_EP_LOG=info)"});
}

}  // namespace

std::vector<PortCounters> read_counters(const Patient& patient) {
  std::vector<PortCounters> result;
  for (const rdma::Nic& nic : patient.nics) {
    for (const rdma::NicPort& port : nic.ports) {
      PortCounters counters{nic.name, port.number, {}};
      for (const Counter& counter : kCounters) {
        const auto value = parse_number<std::uint64_t>(patient.root.text(
            fmt::format("/sys/class/infiniband/{}/ports/{}/{}", nic.name, port.number, counter.file)));
        if (value) counters.values[counter.name] = *value * counter.unit;
      }
      result.push_back(std::move(counters));
    }
  }
  return result;
}

std::vector<PortCounters> difference(const std::vector<PortCounters>& before, std::vector<PortCounters> after) {
  for (std::size_t port = 0; port < after.size(); ++port) {
    const auto now = std::exchange(after[port].values, {});
    for (const auto& [name, value] : now) {
      const auto old = before[port].values.find(name);
      if (old != before[port].values.end() && value >= old->second) after[port].values[name] = value - old->second;
    }
  }
  return after;
}

void check_traffic(const Patient& patient, const std::vector<PortCounters>& traffic, Findings& findings) {
  std::set<std::pair<std::string, int>> mapped = mapped_ports(patient);
  std::vector<const PortCounters*> ports;
  for (const PortCounters& port : traffic) {
    // Without a map every NIC counts.
    if (mapped.empty() || mapped.contains({port.nic, port.port})) ports.push_back(&port);
  }
  if (ports.empty()) {
    findings.push_back({"traffic", Verdict::warning, "there is no NIC to count on"});
    return;
  }
  check_balance(ports, findings);
  for (const PortCounters& port : traffic) {
    for (const Counter& counter : kCounters) {
      const std::uint64_t value = value_of(port, counter.name);
      if (*counter.trouble == '\0' || value == 0) continue;
      findings.push_back({"losses", Verdict::warning,
                          fmt::format("{} port {}: {} {}", port.nic, port.port, counter.name, value), counter.trouble,
                          "check flow control (PFC) and congestion control (ECN) of NICs and switches"});
    }
  }
}

std::string to_text(const std::vector<PortCounters>& traffic) {
  std::string text = "Traffic while the command ran\n";
  for (const PortCounters& port : traffic) {
    text += fmt::format("  {} port {}: sent {}, received {}\n", port.nic, port.port,
                        format_bytes(value_of(port, "sent_bytes")), format_bytes(value_of(port, "received_bytes")));
  }
  return text;
}

int run_command(const std::vector<std::string>& command, bool output_to_stderr) {
  Children children({{.words = command, .output = output_to_stderr ? STDERR_FILENO : STDOUT_FILENO}});
  while (children.running() > 0) children.step();
  return *children.status(0);
}

}  // namespace deep_ep::tools
