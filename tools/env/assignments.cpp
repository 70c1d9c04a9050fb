#include "tools/env/env.hpp"

#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

constexpr std::string_view kMapping = "DEEP_EP_DEVICE_TO_HCA_MAPPING";

/// "0:mlx5_0:1,1:mlx5_1:1", what the automatic choice amounts to; empty if some GPU has no NIC: a mapping must not
/// leave one out.
std::string mapping_of(const Patient& patient) {
  std::string text;
  for (std::size_t i = 0; i < patient.map.rows.size(); ++i) {
    const auto& gpu = patient.map.gpus[i];
    const auto& nics = patient.map.rows[i].nics;
    if (!gpu.cuda_id) continue;
    if (nics.empty()) return "";
    text += fmt::format("{}{}:{}", text.empty() ? "" : ",", *gpu.cuda_id, nics.front().name());
  }
  return text;
}

Assignment row_of(const environment::Variable& variable, const Patient& patient, std::vector<std::string>& notes) {
  const std::string name(variable.name());
  environment::Reader reader(patient.environment);
  const environment::Value value = reader.value(name);
  for (const std::string& ignored : reader.ignored()) notes.push_back(ignored);
  if (value.name == name) return {name, value.text, Origin::variable, "set"};
  if (!value.name.empty()) {
    // In its own words: what is translated may mean less (an index of NCCL's binds no NIC that lacks that GID).
    const std::string text = patient.environment(value.name).value_or("");
    return {std::string(value.name), text, Origin::alias, fmt::format("stands for {}", name)};
  }
  if (name == kMapping) {
    std::string mapping = mapping_of(patient);
    if (!mapping.empty()) {
      return {name, std::move(mapping), Origin::detected,
              "detected: the automatic choice for this machine's GPUs and NICs"};
    }
  }
  return {name, value.text, Origin::standard, "default"};
}

}  // namespace

Environment environment_of(const Patient& patient) {
  if (!patient.refused.empty()) throw InvalidArgument(patient.refused);
  Environment result;
  for (const environment::Variable& variable : environment::variables()) {
    result.rows.push_back(row_of(variable, patient, result.notes));
  }
  for (std::size_t i = 0; i < patient.map.rows.size(); ++i) {
    const auto& row = patient.map.rows[i];
    if (row.nics.empty() && patient.map.gpus[i].cuda_id) {
      result.notes.push_back(fmt::format("{}: no NIC: {}", patient.map.gpus[i].text(), row.problem));
    }
  }
  return result;
}

}  // namespace deep_ep::tools
