#include "tools/env/env.hpp"

#include <algorithm>
#include <optional>

#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
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
    const auto& nic = patient.map.rows[i].nic;
    if (!gpu.cuda_id) continue;
    if (!nic) return "";
    text += fmt::format("{}{}:{}", text.empty() ? "" : ",", *gpu.cuda_id, nic->name());
  }
  return text;
}

const Setting* find(const std::vector<Setting>& settings, std::string_view name) {
  const auto found = std::ranges::find_if(settings, [&](const Setting& s) { return s.name == name; });
  return found == settings.end() ? nullptr : &*found;
}

Assignment own(const environment::Variable& variable, const Patient& patient, const Profile* profile,
               std::vector<std::string>& notes) {
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
  const Setting* setting = profile == nullptr ? nullptr : find(profile->own, name);
  if (setting != nullptr) {
    return {name, std::string(setting->value), Origin::profile,
            fmt::format("profile {}: {}", profile->name, setting->why)};
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

std::vector<Assignment> for_nccl(const Patient& patient, const Profile& profile) {
  std::vector<Assignment> result;
  for (const Setting& setting : profile.nccl) {
    const std::string name(setting.name);
    if (const auto set = patient.environment(name)) {
      result.push_back({name, *set, Origin::other, "set"});
    } else {
      result.push_back({name, std::string(setting.value), Origin::profile,
                        fmt::format("profile {}: {}", profile.name, setting.why)});
    }
  }
  if (!profile.nccl_folder.empty()) {
    const std::string path = patient.environment("LD_LIBRARY_PATH").value_or(std::string(profile.library_path));
    const std::vector<std::string_view> folders = split(path, ':');
    const bool there = std::find(folders.begin(), folders.end(), profile.nccl_folder) != folders.end();
    result.push_back({"LD_LIBRARY_PATH", there ? path : fmt::format("{}:{}", path, profile.nccl_folder),
                      there ? Origin::other : Origin::profile,
                      there ? "set" : fmt::format("profile {}: the plug-in's libraries, last", profile.name)});
  }
  return result;
}

}  // namespace

Environment environment_of(const Patient& patient, const Profile* profile, bool nccl) {
  if (!patient.refused.empty()) throw InvalidArgument(patient.refused);
  Environment result;
  for (const environment::Variable& variable : environment::variables()) {
    result.own.push_back(own(variable, patient, profile, result.notes));
  }
  for (std::size_t i = 0; i < patient.map.rows.size(); ++i) {
    const auto& row = patient.map.rows[i];
    if (!row.nic && patient.map.gpus[i].cuda_id) {
      result.notes.push_back(fmt::format("{}: no NIC: {}", patient.map.gpus[i].text(), row.problem));
    }
  }
  if (nccl) {
    result.nccl = for_nccl(patient, *profile);
    if (!profile->nccl_script.empty() && patient.root.exists(profile->nccl_script))
      result.nccl_script = profile->nccl_script;
  }
  return result;
}

std::vector<Assignment> to_set(const Environment& environment) {
  std::vector<Assignment> result;
  for (const auto* part : {&environment.own, &environment.nccl}) {
    for (const Assignment& assignment : *part) {
      const bool known =
          std::ranges::any_of(result, [&](const Assignment& other) { return other.name == assignment.name; });
      if (assignment.origin != Origin::standard && !known) result.push_back(assignment);
    }
  }
  return result;
}

}  // namespace deep_ep::tools
