#include "tools/doctor/nic_test/subjects.hpp"

#include <cmath>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "csrc/rdma/discovery/nic_map.hpp"
#include "csrc/rdma/local/local_ends.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "csrc/support/format.hpp"
#include "simulation/simulated_ends.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

using rdma::nic_test::Subject;

rdma::WireSetting wire_of(const std::string& text) {
  try {
    return rdma::parse_wire(text);
  } catch (const InvalidArgument& error) {
    fail<InvalidArgument>("--wire {}: {}", text, error.what());
  }
}

/// The path with a time-out by which a NIC that gets no answer gives up within `seconds`, if it is not shorter anyway.
rdma::PathOptions giving_up_within(rdma::PathOptions path, double seconds) {
  const auto tries_for = [&](int timeout) { return 4.096e-6 * std::exp2(timeout) * (path.retry_count + 1); };
  if (path.ack_timeout == 0) path.ack_timeout = 31;  // for ever
  while (path.ack_timeout > 1 && tries_for(path.ack_timeout) > seconds) --path.ack_timeout;
  return path;
}

/// Opens the NIC and makes queue pairs on it.
rdma::nic_test::MakeEndsOn on_nic(const rdma::NicAssignment& nic, const std::shared_ptr<Executor>& executor,
                                  rdma::RdmaSettings settings, const NicTestOptions& options) {
  // So that NICs say why they cannot reach a peer before this test is tired of waiting.
  settings.path = giving_up_within(settings.path, options.seconds / 90);
  return [=](rdma::NicHandler handler, const SymmetricHeap& heap, const rdma::ConnectionOptions& options) {
    rdma::verbs::NicAccess opened = rdma::verbs::open_nic(nic, *executor, settings, heap);
    return rdma::verbs::make_nic_ends(handler, opened, executor, options);
  };
}

rdma::nic_test::Link link_of(const rdma::NicAssignment& nic, bool relaxed_ordering) {
  const topology::SystemRoot root;
  const auto number = [&](const std::string& path) { return std::strtod(root.text(path).c_str(), nullptr); };
  const std::string device = "/sys/class/infiniband/" + nic.nic.name + "/device/";
  const auto pcie = [&](const char* which) {
    return number(device + which + "_link_speed") * number(device + which + "_link_width");
  };
  return {.gbps = nic.port.rate_gbps,
          .pcie_gbps = pcie("current"),
          .pcie_best_gbps = pcie("max"),
          .interface_mtu =
              nic.gid.netdev.empty() ? 0 : static_cast<int>(number("/sys/class/net/" + nic.gid.netdev + "/mtu")),
          .virtual_machine = rdma::is_virtual_machine(root),
          .relaxed_ordering = relaxed_ordering};
}

Subject nic_subject(const rdma::NicAssignment& nic, const std::shared_ptr<Executor>& executor, const std::string& by,
                    const rdma::RdmaSettings& settings, const NicTestOptions& options) {
  const bool cuda = executor->device().kind == Device::Kind::cuda;
  Subject subject{.name = fmt::format("{}, rung by {}", nic.name(), by),
                  .executor = executor,
                  .make = on_nic(nic, executor, settings, options),
                  .handler = settings.nic_handler,
                  .others = {},
                  .no_others = "handler cpu: there is no doorbell register, and rings lie in host memory",
                  .link = link_of(nic, rdma::verbs::relaxes_ordering(settings, nic.nic))};
  if (!cuda && subject.handler == rdma::NicHandler::automatic) subject.handler = rdma::NicHandler::cpu;
  const bool has_registers = cuda && nic.nic.capability == rdma::Capability::mlx5;
  subject.wants_gpu_handler = has_registers && settings.nic_handler < rdma::NicHandler::doorbell;
  subject.link.is_judged = subject.wants_gpu_handler;
  if (options.between_machines()) {
    subject.no_others = "other handlers are tested without --listen and --peer";
  } else if (subject.wants_gpu_handler) {
    subject.others = {rdma::NicHandler::doorbell, rdma::NicHandler::cpu};
  }
  return subject;
}

void add_nics_of_gpus(const Patient& patient, const NicTestOptions& options, Subjects& found) {
  std::map<std::string, std::string> rung_by;
  for (int gpu = 0; gpu < cuda_device_count(); ++gpu) {
    const std::string by = fmt::format("GPU {}", gpu);
    try {
      const rdma::NicAssignment nic = rdma::nics_of_cuda_device(patient.map, gpu).front();
      const auto [first, is_new] = rung_by.emplace(nic.name(), by);
      if (!is_new) {
        found.leave_out(fmt::format("{} has {}, which {} has tested", by, first->first, first->second));
        continue;
      }
      found.subjects.push_back(nic_subject(nic, make_executor(Device::Kind::cuda, gpu), by, patient.settings, options));
    } catch (const Error& error) {
      found.leave_out(fmt::format("{}: {}", by, error.what()));
    }
  }
  for (const std::string& nic : patient.map.unused) found.leave_out(nic);
}

void add_nics_of_cpu(const Patient& patient, const NicTestOptions& options, Subjects& found) {
  // As many ranks as NICs: each usable one gets a rank, and ranks beyond share.
  const rdma::NicMap map = rdma::map_gpus_to_nics(rdma::ranks_without_gpu(static_cast<int>(patient.nics.size())),
                                                  patient.nics, patient.settings);
  std::set<std::string> names;
  for (const rdma::NicMapRow& row : map.rows) {
    if (row.nics.empty() || !names.insert(row.nics.front().name()).second) continue;
    found.subjects.push_back(nic_subject(row.nics.front(), make_host_executor(), "the CPU", patient.settings, options));
  }
  for (const std::string& nic : map.unused) found.leave_out(nic);
}

}  // namespace

Subjects find_subjects(const Patient& patient, const NicTestOptions& options) {
  rdma::read_settings(patient.environment);  // refuses what examine() leaves at the defaults
  const Device::Kind kind = choose_device(options.device, 1);
  Subjects found;
  rdma::WireSetting wanted = wire_of(options.wire);
  if (wanted.kind == rdma::WireKind::automatic) wanted = patient.settings.wire;
  rdma::WireKind wire = wanted.kind;
  if (wire == rdma::WireKind::automatic && patient.nics.empty()) {
    wire = rdma::WireKind::local;
    found.leave_out(rdma::why_no_rdma(patient.map));
  }
  if (wire == rdma::WireKind::local || wire == rdma::WireKind::simulated) {
    const std::shared_ptr<Executor> executor = make_executor(kind, 0);
    const bool simulated = wire == rdma::WireKind::simulated;
    found.subjects.push_back(
        {.name = fmt::format("wire {} (no NIC), {}", rdma::name_of(wire), kind == Device::Kind::cuda ? "GPU 0" : "CPU"),
         .executor = executor,
         .make =
             [=, nic = wanted.nic](rdma::NicHandler, const SymmetricHeap& heap,
                                   const rdma::ConnectionOptions& options) {
               return simulated ? rdma::make_simulated_ends(executor, heap, options, nic)
                                : rdma::make_local_ends(executor, heap, options);
             },
         .others = {},
         .no_others = "there is no NIC, so no doorbell register"});
    return found;
  }
  kind == Device::Kind::cuda ? add_nics_of_gpus(patient, options, found) : add_nics_of_cpu(patient, options, found);
  if (found.subjects.empty()) {
    const std::string why = rdma::why_no_rdma(patient.map);
    found.left_out.push_back({"nic", rdma::nic_test::Outcome::fail,
                              why.empty() ? "no NIC of this machine can be tested" : why,
                              "RDMA does not work here at all", "see the findings of deep_ep doctor"});
  }
  return found;
}

}  // namespace deep_ep::tools
