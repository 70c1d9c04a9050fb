#include "tools/doctor/build.hpp"

#include "csrc/support/text.hpp"

namespace deep_ep::tools {

BuiltFor built_for() {
  BuiltFor build;
#ifdef DEEP_EP_BUILT_WITH_CUDA
  build.cuda = DEEP_EP_BUILT_WITH_CUDA;
  for (const std::string_view architecture : split(DEEP_EP_BUILT_FOR_GPUS, ' ')) {
    if (!architecture.empty()) build.architectures.emplace_back(architecture);
  }
#endif
  return build;
}

}  // namespace deep_ep::tools
