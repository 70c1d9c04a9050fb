// `deep_ep env` and `deep_ep doctor`: which variables have which value here, and why.
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "tools/common/variables.hpp"
#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

constexpr std::string_view kMapping = "DEEP_EP_DEVICE_TO_HCA_MAPPING";

/// "0:mlx5_0:1,1:mlx5_1:1", what the automatic choice amounts to; empty if some GPU has no NIC: a mapping must not
/// leave one out.
std::string mapping_of(const Patient& patient) {
  std::string text;
  for (const rdma::NicMapRow& row : patient.map.rows) {
    if (!row.gpu.cuda_id) continue;
    if (row.nics.empty()) return "";
    text += fmt::format("{}{}:{}", text.empty() ? "" : ",", *row.gpu.cuda_id, row.nics.front().name());
  }
  return text;
}

Assignment assignment_of(const environment::Variable& variable, const Patient& patient) {
  const std::string name(variable.name());
  environment::Reader reader{patient.environment};
  try {
    const environment::Value value = value_of(reader, name);
    Assignment result{&variable,  value,     name,
                      value.text, "default", fmt::format("{}", fmt::join(reader.ignored, "; "))};
    if (!value.name.empty()) {
      // In its own words: what is translated may mean less (an index of NCCL's binds no NIC that lacks that GID).
      result.name = value.name;
      result.text = patient.environment(value.name).value_or("");
      result.source = value.name == name ? "set" : fmt::format("stands for {}", name);
    } else if (std::string mapping = name == kMapping ? mapping_of(patient) : ""; !mapping.empty()) {
      result.text = std::move(mapping);
      result.source = "detected: the automatic choice for this machine's GPUs and NICs";
    }
    return result;
  } catch (const InvalidArgument& error) {
    const std::string text = patient.environment(name).value_or("");
    return {&variable, {text, variable.name()}, name, text, "", error.what()};
  }
}

}  // namespace

std::vector<Assignment> assignments_of(const Patient& patient) {
  std::vector<Assignment> all;
  for (const environment::Variable& variable : environment::variables()) {
    all.push_back(assignment_of(variable, patient));
  }
  return all;
}

}  // namespace deep_ep::tools
