// `deep_ep doctor`: RANK, WORLD_SIZE and their like, which mean processes to some programs and nodes to others, and
// whether the first of them can be reached.
#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <string>

#include "csrc/support/text.hpp"
#include "tools/doctor/checks.hpp"
#include "tools/doctor/clock.hpp"
#include "tools/doctor/reach.hpp"

namespace deep_ep::tools {
namespace {

class LaunchVariables {
 public:
  LaunchVariables(const Patient& patient, Findings& findings) : patient_(patient), findings_(findings) {}

  bool is_set(const char* name) const { return patient_.environment(name).has_value(); }

  /// Nothing where it is not set, or no number, which is said then.
  std::optional<std::int64_t> number(const char* name) {
    const auto text = patient_.environment(name);
    if (!text) return std::nullopt;
    const auto value = parse_number<std::int64_t>(trim(*text));
    if (value && *value >= 0) return value;
    findings_.push_back({"ranks", Verdict::error, fmt::format("{}='{}' is not a number", name, *text),
                         "what reads it refuses to start", "correct or unset it"});
    return std::nullopt;
  }

 private:
  const Patient& patient_;
  Findings& findings_;
};

void check_below(const char* name, std::optional<std::int64_t> value, const char* of, std::optional<std::int64_t> size,
                 Findings& findings) {
  if (!value || !size || *value < *size) return;
  findings.push_back({"ranks", Verdict::error, fmt::format("{}={} is not below {}={}", name, *value, of, *size),
                      "ranks are counted from 0: this one is nobody's peer, so the others wait for it in vain",
                      "start ranks by one launcher only, and export nothing by hand"});
}

// MPI and Slurm leave numbers of their own: two launchers at once do not agree by themselves.
void check_launchers(LaunchVariables& variables, std::optional<std::int64_t> world, Findings& findings) {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    const auto size = variables.number(name);
    if (!size || !world || *size == *world) continue;
    findings.push_back({"ranks", Verdict::warning, fmt::format("WORLD_SIZE={} beside {}={}", *world, name, *size),
                        "one means nodes and the other processes, or one is left over from another launcher",
                        "unset those of the launcher that is not meant"});
  }
}

}  // namespace

void check_ranks(const Patient& patient, Findings& findings) {
  LaunchVariables variables(patient, findings);
  const std::size_t before = findings.size();
  const auto world = variables.number("WORLD_SIZE");
  const auto rank = variables.number("RANK");
  const auto local_world = variables.number("LOCAL_WORLD_SIZE");
  const auto local_rank = variables.number("LOCAL_RANK");
  if (!world && !rank && !local_rank) return;
  check_below("RANK", rank, "WORLD_SIZE", world, findings);
  check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world, findings);
  check_launchers(variables, world, findings);
  if (world.has_value() != rank.has_value()) {
    findings.push_back(
        {"ranks", Verdict::error,
         fmt::format("{} is set, {} is not", world ? "WORLD_SIZE" : "RANK", world ? "RANK" : "WORLD_SIZE"),
         "neither is of use without the other", "set both or none"});
  }
  if (local_rank && world && local_world && *local_world > 0 && *world % *local_world != 0) {
    findings.push_back({"ranks", Verdict::warning,
                        fmt::format("WORLD_SIZE={} is not a multiple of LOCAL_WORLD_SIZE={}", *world, *local_world),
                        "nodes have different numbers of ranks; normal mode between nodes needs equal ones",
                        "the same number of processes on every node"});
  }
  if (!local_rank && world && rank) {
    // DeepEP's tests, deep_ep launch and deep_ep bench count nodes in these two, PyTorch processes.
    findings.push_back(
        {"ranks", Verdict::warning,
         fmt::format("WORLD_SIZE={} and RANK={} without LOCAL_RANK: nodes or processes?", *world, *rank),
         "DeepEP's tests and deep_ep take them for nodes, PyTorch for processes; a wrong guess waits for ever",
         "for nodes nothing; for processes, start them by deep_ep launch or torchrun, which set LOCAL_RANK, too"});
  }
  if (!variables.is_set("MASTER_ADDR") && world && *world > 1) {
    findings.push_back({"ranks", Verdict::warning, fmt::format("WORLD_SIZE={} without MASTER_ADDR", *world),
                        "ranks do not know where rank 0 is", "MASTER_ADDR names the host of rank 0"});
  }
  if (const auto port = variables.number("MASTER_PORT"); port && (*port < 1 || *port > 65535)) {
    findings.push_back({"ranks", Verdict::error, fmt::format("MASTER_PORT={} is no TCP port", *port),
                        "ranks cannot find each other", "1 to 65535, usually 29500"});
  }
  if (findings.size() != before) return;
  findings.push_back(
      {"ranks", Verdict::ok,
       fmt::format("rank {} of {} processes{}", rank ? *rank : 0, world ? *world : 1,
                   local_rank && local_world ? fmt::format(", {} of {} on this node", *local_rank, *local_world) : ""),
       "", ""});
}

void check_meeting(const Patient& patient, Findings& findings) {
  check_master(patient, findings);
  check_clock(patient, findings);
}

void check_master(const Patient& patient, Findings& findings) {
  const auto host = patient.environment("MASTER_ADDR");
  if (!host || !patient.root.is_this_machine()) return;
  const auto nodes = patient.environment("NNODES");
  if (nodes && *nodes != "1" && (*host == "localhost" || host->starts_with("127."))) {
    findings.push_back({"master", Verdict::error, fmt::format("MASTER_ADDR={} with NNODES={}", *host, *nodes),
                        "the other nodes look for rank 0 on themselves", "a name or address that all nodes reach"});
    return;
  }
  const std::string port = patient.environment("MASTER_PORT").value_or("29500");
  const Reach reach = try_to_reach(*host, port, 2.0);
  switch (reach.outcome) {
    case Reach::Outcome::reached:
      findings.push_back(
          {"master", Verdict::ok, fmt::format("{} port {} answers at {}", *host, port, reach.address), "", ""});
      break;
    case Reach::Outcome::refused:
      findings.push_back({"master", Verdict::note,
                          fmt::format("{} is {}, but nobody listens at port {}", *host, reach.address, port),
                          "as it must be before rank 0 has started", ""});
      break;
    case Reach::Outcome::silent:
      findings.push_back({"master", Verdict::warning,
                          fmt::format("{} ({}) does not answer at port {} within 2 s", *host, reach.address, port),
                          "a firewall or network policy drops packets, or the host is down",
                          "open the port between the nodes; in Kubernetes, a headless service and no network policy"});
      break;
    case Reach::Outcome::unknown_name:
      findings.push_back(
          {"master", Verdict::warning, fmt::format("MASTER_ADDR={}: {}", *host, reach.problem),
           "ranks cannot find rank 0",
           "in Kubernetes, a headless service with publishNotReadyAddresses: true, and subdomain in the pods"});
      break;
  }
}

}  // namespace deep_ep::tools
