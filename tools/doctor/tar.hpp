// Files to attach to a report: a tar archive of texts, whole or not there.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace deep_ep::tools {

using TarMembers = std::vector<std::pair<std::string, std::string>>;  ///< name and text

/// Below `folder` in the archive. Under another name first, then renamed; a device or pipe is written to as it is.
/// SystemError where it cannot be written.
void write_tar(const std::string& file, const std::string& folder, const TarMembers& members);

/// Variables that RDMA libraries and launchers read, those with secrets in their names without values. No others.
std::string variables_for_reports();

}  // namespace deep_ep::tools
