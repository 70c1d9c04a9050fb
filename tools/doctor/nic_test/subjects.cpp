#include "tools/doctor/nic_test/subjects.hpp"

#include <fmt/format.h>

#include <array>
#include <set>
#include <utility>

#include "csrc/rdma/discovery/machine.hpp"
#include "csrc/rdma/local/local_ends.hpp"
#include "csrc/rdma/nic_test/judge.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "deep_ep/error.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {
namespace {

using rdma::nic_test::Subject;
using rdma::nic_test::Way;
using Adjust = void (*)(rdma::verbs::NicAccess&);
using DoorbellKind = rdma::verbs::devx::DoorbellPage::Kind;

struct Adjustment {
  const char* name;
  Adjust adjust;
};

template <DoorbellKind kind>
void ring_by(rdma::verbs::NicAccess& access) {
  access.handler = rdma::NicHandler::gpu;
  access.doorbell = kind;
}

constexpr std::array kAdjustments = {
    Adjustment{"handler gpu, own register, rings in GPU memory", ring_by<DoorbellKind::own_register>},
    Adjustment{"handler gpu, shared register, rings in GPU memory", ring_by<DoorbellKind::shared_register>},
    Adjustment{"handler gpu, write-combining register, rings in GPU memory", ring_by<DoorbellKind::write_combining>},
    Adjustment{"handler gpu, rings in host memory",
               [](rdma::verbs::NicAccess& access) {
                 access.handler = rdma::NicHandler::gpu;
                 access.rings_in_host_memory = true;
               }},
    Adjustment{"handler cpu", [](rdma::verbs::NicAccess& access) { access.handler = rdma::NicHandler::cpu; }},
};

/// Opens the NIC, changed by `adjust` where given, and makes queue pairs on it.
rdma::nic_test::MakeEnds on_nic(const rdma::NicAssignment& nic, const std::shared_ptr<Executor>& executor,
                                const rdma::RdmaSettings& settings, Adjust adjust) {
  return [=](const SymmetricHeap& heap, const rdma::EndsOptions& options) {
    rdma::verbs::NicAccess access = rdma::verbs::open_nic(nic, *executor, settings);
    if (adjust != nullptr) adjust(access);
    return rdma::verbs::make_nic_ends(access, executor, heap, options);
  };
}

Subject nic_subject(const rdma::NicAssignment& nic, const std::shared_ptr<Executor>& executor, const std::string& by,
                    const rdma::RdmaSettings& settings, bool between_machines) {
  Subject subject{.name = fmt::format("{}:{}, rung by {}", nic.nic, nic.port, by),
                  .executor = executor,
                  .make = on_nic(nic, executor, settings, nullptr),
                  .others = {},
                  .no_others = "handler cpu: there is no doorbell register, and rings lie in host memory",
                  .link_gbps = nic.rate_gbps};
  const bool has_registers = executor->device().kind == Device::Kind::cuda && nic.capability == rdma::Capability::mlx5;
  subject.wants_gpu_handler = has_registers && settings.nic_handler != rdma::NicHandler::cpu;
  if (between_machines) {
    subject.no_others = "a NIC's doorbells and rings are tested without --listen and --peer";
  } else if (has_registers) {
    for (const Adjustment& way : kAdjustments) {
      subject.others.push_back({way.name, on_nic(nic, executor, settings, way.adjust)});
    }
  }
  return subject;
}

void leave_out(const std::vector<std::string>& nics, Subjects& found) {
  for (const std::string& nic : nics) found.left_out.push_back(rdma::nic_test::skipped("nics", nic));
}

void add_nics_of_gpus(const Patient& patient, const SubjectChoice& choice, Subjects& found) {
  std::set<std::string> names;
  for (int gpu = 0; gpu < cuda_device_count(); ++gpu) {
    const std::string by = fmt::format("GPU {}", gpu);
    try {
      const rdma::NicAssignment nic = rdma::nic_of_cuda_device(gpu);
      if (!names.insert(fmt::format("{}:{}", nic.nic, nic.port)).second) continue;
      found.subjects.push_back(
          nic_subject(nic, make_executor(Device::Kind::cuda, gpu), by, patient.settings, choice.between_machines));
    } catch (const SystemError& error) {
      found.left_out.push_back(rdma::nic_test::skipped(by, error.what()));
    }
  }
  leave_out(patient.map.unused, found);
}

void add_nics_of_cpu(const Patient& patient, const SubjectChoice& choice, Subjects& found) {
  // As many ranks as NICs: each usable one gets a rank, and ranks beyond share.
  const rdma::NicMap map = rdma::map_gpus_to_nics(rdma::ranks_without_gpu(static_cast<int>(patient.nics.size())),
                                                  patient.nics, patient.settings);
  std::set<std::string> names;
  for (std::size_t rank = 0; rank < map.rows.size(); ++rank) {
    if (!map.rows[rank].port) continue;
    const rdma::NicAssignment nic = rdma::assignment_of(map, rank);
    if (!names.insert(fmt::format("{}:{}", nic.nic, nic.port)).second) continue;
    found.subjects.push_back(
        nic_subject(nic, make_host_executor(), "the CPU", patient.settings, choice.between_machines));
  }
  leave_out(map.unused, found);
}

}  // namespace

Subjects find_subjects(const Patient& patient, const SubjectChoice& choice) {
  if (!patient.refused.empty()) throw InvalidArgument(patient.refused);
  const Device::Kind kind = choose_device(choice.device, 1);
  Subjects found;
  const bool local =
      choice.wire == rdma::WireKind::local || (choice.wire == rdma::WireKind::automatic && patient.nics.empty());
  if (local) {
    if (choice.wire == rdma::WireKind::automatic) {
      found.left_out.push_back(rdma::nic_test::skipped("nics", rdma::why_no_rdma(patient.map)));
    }
    const std::shared_ptr<Executor> executor = make_executor(kind, 0);
    found.subjects.push_back(
        {.name = fmt::format("wire local (no NIC), {}", kind == Device::Kind::cuda ? "GPU 0" : "CPU"),
         .executor = executor,
         .make = [executor, rank = choice.rank](
                     const SymmetricHeap& heap,
                     const rdma::EndsOptions& options) { return rdma::make_local_ends(executor, heap, rank, options); },
         .others = {},
         .no_others = "there is no NIC, so no doorbell register"});
    return found;
  }
  kind == Device::Kind::cuda ? add_nics_of_gpus(patient, choice, found) : add_nics_of_cpu(patient, choice, found);
  if (found.subjects.empty()) {
    const std::string why = rdma::why_no_rdma(patient.map);
    found.left_out.push_back({"nics", rdma::nic_test::Outcome::fail,
                              why.empty() ? "no NIC of this machine can be tested" : why,
                              "RDMA does not work here at all", "see the findings of deep_ep doctor"});
  }
  return found;
}

}  // namespace deep_ep::tools
