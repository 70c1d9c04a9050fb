#include "csrc/memory/process_identity.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <mutex>
#include <optional>
#include <string>

#include "csrc/support/home_process.hpp"
#include "csrc/support/token.hpp"

namespace deep_ep {
namespace {

std::uint64_t inode(const char* path) {
  struct stat status {};
  return ::stat(path, &status) == 0 ? static_cast<std::uint64_t>(status.st_ino) : 0;
}

std::uint64_t process_token() {
  static std::mutex mutex;
  static std::optional<HomeProcess> drawn_in;
  static std::uint64_t token = 0;
  const std::lock_guard lock(mutex);
  if (!drawn_in || drawn_in->left()) {  // a forked child is another process
    drawn_in.emplace();
    token = random_bits<std::uint64_t>();
  }
  return token;
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
  identity.network_namespace = inode("/proc/self/ns/net");
  identity.token = process_token();
  return identity;
}

}  // namespace deep_ep
