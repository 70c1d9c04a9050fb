#include "csrc/memory/process_identity.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace deep_ep {
namespace {

std::uint64_t inode(const char* path) {
  struct stat status {};
  return ::stat(path, &status) == 0 ? static_cast<std::uint64_t>(status.st_ino) : 0;
}

}  // namespace

ProcessIdentity this_process() {
  ProcessIdentity identity;
  ::gethostname(identity.host.data(), identity.host.size() - 1);
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  // Without a boot id, fall back on the name: wrong only where hosts share one.
  if (boot_id.empty()) boot_id = identity.host.data();
  std::copy_n(boot_id.begin(), std::min(boot_id.size(), identity.boot_id.size() - 1), identity.boot_id.begin());
  identity.pid_namespace = inode("/proc/self/ns/pid");
  identity.network_namespace = inode("/proc/self/ns/net");
  identity.pid = ::getpid();
  return identity;
}

}  // namespace deep_ep
