// Kinds of clusters, and what fits all machines of a kind.
#pragma once

#include <span>
#include <string_view>
#include <vector>

namespace deep_ep::tools {

struct Setting {
  std::string_view name;
  std::string_view value;
  std::string_view why;
};

struct Profile {
  std::string_view name;
  std::string_view help;
  std::vector<Setting> own;
  std::vector<Setting> nccl;
  bool nccl_nics = false;              ///< NCCL gets the NICs that were found (NCCL_IB_HCA)
  std::string_view nccl_script = {};   ///< where the plug-in's own script lies, if the kind has one
  std::string_view nccl_folder = {};   ///< of the plug-in's libraries, which LD_LIBRARY_PATH must have
  std::string_view library_path = {};  ///< in front of it where LD_LIBRARY_PATH is not set: NVIDIA's driver
};

std::span<const Profile> profiles();
/// InvalidArgument lists the names there are.
const Profile& profile_of(std::string_view name);

}  // namespace deep_ep::tools
