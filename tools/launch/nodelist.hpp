// Names of nodes in Slurm's short notation.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace deep_ep::tools {

/// "gpu[1-2,07],login" is gpu1, gpu2, gpu07 and login, in this order. A range has as many digits as its first number; a
/// name may have several brackets. InvalidArgument, which names `variable`, where the text is not of this kind.
std::vector<std::string> expand_nodelist(std::string_view variable, std::string_view text);

}  // namespace deep_ep::tools
