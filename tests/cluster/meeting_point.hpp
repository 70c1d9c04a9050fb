// Where ranks meet that are processes which do not come from a fork: a file of their parent, by its path.
#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/unique_fd.hpp"

namespace deep_ep::test {

/// Of one group. It lives in the parent, until all ranks have met.
class MeetingPoint {
 public:
  std::string path() const { return fmt::format("/proc/{}/fd/{}", ::getpid(), file_.get()); }

 private:
  UniqueFd file_ = UniqueFd(::memfd_create("meeting-point", MFD_CLOEXEC));
};

inline std::shared_ptr<Bootstrap> meet_at(const std::string& path, int rank, int size, double timeout_s) {
  const UniqueFd file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!file) throw std::runtime_error("nothing to meet at: " + path);
  return make_file_bootstrap(file.get(), rank, size, timeout_s);
}

}  // namespace deep_ep::test
