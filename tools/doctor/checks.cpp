#include "tools/doctor/checks.hpp"

#include <algorithm>
#include <utility>

#include "deep_ep/error.hpp"
#include "tools/doctor/catalogue.hpp"

namespace deep_ep::tools {

Patient examine(topology::SystemRoot root, environment::Source variables, const std::vector<std::string>& names) {
  Patient patient;
  patient.root = std::move(root);
  patient.environment = std::move(variables);
  patient.variable_names = names;
  patient.unknown_variables = environment::unknown_of(names);
  patient.gpus = topology::find_gpus(patient.root);
  patient.nics = rdma::find_nics(patient.root);
  try {
    patient.settings = rdma::read_settings(patient.environment);
  } catch (const InvalidArgument& error) {
    patient.refused = error.what();
  }
  // Two such machines, where nobody says otherwise.
  const auto gpus =
      std::count_if(patient.gpus.begin(), patient.gpus.end(), [](const auto& gpu) { return gpu.cuda_id; });
  patient.run.ranks_per_node = gpus > 0 ? static_cast<int>(gpus) : patient.run.ranks_per_node;
  patient.run.ranks = 2 * patient.run.ranks_per_node;
  patient.map = rdma::map_gpus_to_nics(patient.gpus, patient.nics, patient.settings);
  return patient;
}

Findings check_everything(const Patient& patient) { return run_checks(patient, Check::Cost::deep); }

}  // namespace deep_ep::tools
