#include "tools/doctor/build.hpp"

#include "csrc/support/text.hpp"
#include "tools/common/version.hpp"

namespace deep_ep::tools {

BuiltFor built_for() {
  BuiltFor build;
  for (const auto& [name, fact] : build_facts()) {
    if (fact.starts_with("none")) continue;
    if (name == "cuda") build.cuda = fact;
    if (name != "gpu code") continue;
    for (const std::string_view architecture : split(fact, ' ')) {
      if (!architecture.empty()) build.architectures.emplace_back(architecture);
    }
  }
  return build;
}

}  // namespace deep_ep::tools
