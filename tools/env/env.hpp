// `deep_ep env`: which variables have which value here, and why; and the forms in which that is printed.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {

// --- kinds of clusters, and what fits all machines of a kind ---

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
  std::string_view nccl_script = {};   ///< where the plug-in's own script lies, if the kind has one
  std::string_view nccl_folder = {};   ///< of the plug-in's libraries, which LD_LIBRARY_PATH must have
  std::string_view library_path = {};  ///< in front of it where LD_LIBRARY_PATH is not set: NVIDIA's driver
};

std::span<const Profile> profiles();
/// InvalidArgument lists the names there are.
const Profile& profile_of(std::string_view name);

// --- what a script sets ---

/// Why a variable has its value. The first origin in this list wins.
enum class Origin : std::uint8_t {
  variable,  ///< the library's own variable is set
  alias,     ///< a variable of another library is set, and honoured
  other,     ///< a variable for NCCL is set, which this library does not read
  profile,
  detected,  ///< from this machine's files
  standard,  ///< the default
};

struct Assignment {
  std::string name;
  std::string value;
  Origin origin = Origin::standard;
  std::string source;  ///< in words: "set", "by NCCL_IB_TC=52", "profile gke-a4: ...", "default"
};

struct Environment {
  std::vector<Assignment> own;   ///< one for each row of the table, in its order; defaults as well
  std::vector<Assignment> nccl;  ///< NCCL's own variables, where the profile's were asked for
  std::vector<std::string> notes;
  /// A script of the NCCL plug-in that sets NCCL's variables better than the profile does; empty if there is none.
  std::string nccl_script;
};

/// InvalidArgument names an own variable that is wrong: a script with it would only carry the mistake on.
Environment environment_of(const Patient& patient, const Profile* profile, bool nccl);

/// The variables that a script sets: all but defaults, each name once.
std::vector<Assignment> to_set(const Environment& environment);

// --- the forms in which it is printed ---

/// For POSIX shells, to be sourced any number of times, also under `set -eu`.
std::string to_shell(const Environment& environment, const Profile* profile);
/// Items of the list `env` of a container; `helm`: values of the chart deploy/helm/deep-ep-testbed, the map
/// `workload.env`.
std::string to_yaml(const Environment& environment, const Profile* profile, bool helm);
/// Every variable with its value and where that comes from, defaults as well.
std::string explain(const Environment& environment);

/// 'text', for a shell.
std::string quoted_for_shell(const std::string& text);

/// docs/reference/environment.md: every variable that the library reads, and what becomes of those that users of other
/// libraries have set.
std::string reference_page();

}  // namespace deep_ep::tools
