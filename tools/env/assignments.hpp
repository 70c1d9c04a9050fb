// What `deep_ep env` prints as a script: which variables have which value here, and why.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tools/doctor/checks.hpp"
#include "tools/env/profiles.hpp"

namespace deep_ep::tools {

/// Why a variable has its value. What comes first here wins.
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

/// What a script sets: all but defaults, each name once.
std::vector<Assignment> to_set(const Environment& environment);

}  // namespace deep_ep::tools
