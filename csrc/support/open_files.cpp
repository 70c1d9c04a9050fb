#include "csrc/support/open_files.hpp"

#include <sys/resource.h>

#include <cerrno>
#include <filesystem>

#include "csrc/support/format.hpp"

namespace deep_ep {

void make_room_for_files(std::size_t more) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  constexpr std::size_t kOthers = 64;  // that are open for moments, and the program's next ones
  std::error_code unknown;
  std::size_t open = 0;
  for (std::filesystem::directory_iterator each("/proc/self/fd", unknown), end; !unknown && each != end;
       each.increment(unknown)) {
    ++open;
  }
  const std::size_t needed = open + more, wanted = needed + kOthers;
  if (wanted <= limit.rlim_cur) return;
  if (needed > limit.rlim_max) {
    fail<SystemError>(
        "the limit of open files must be at least {}, got {}: {} are open, and the connections to the other ranks take "
        "{}. Raise the hard limit (`ulimit -Hn`, LimitNOFILE of a service)",
        needed, limit.rlim_max, open, more);
  }
  limit.rlim_cur = limit.rlim_max;
  if (::setrlimit(RLIMIT_NOFILE, &limit) == 0) return;
  fail<SystemError>("raising the soft limit of open files to {}: {}", limit.rlim_max, errno_text(errno));
}

}  // namespace deep_ep
