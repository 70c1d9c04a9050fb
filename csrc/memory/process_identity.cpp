#include "csrc/memory/process_identity.hpp"

#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <string>

#include "csrc/support/token.hpp"

namespace deep_ep {
namespace {

/// 0: none is drawn yet. A forked child is another process.
std::atomic<std::uint64_t> token = 0;
[[maybe_unused]] const int registered = ::pthread_atfork(nullptr, nullptr, [] { token = 0; });

}  // namespace

ProcessIdentity this_process() {
  ProcessIdentity identity;
  ::gethostname(identity.host.data(), identity.host.size() - 1);
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  // Without a boot id, fall back on the name: wrong only where hosts share one.
  if (boot_id.empty()) boot_id = identity.host.data();
  std::copy_n(boot_id.begin(), std::min(boot_id.size(), identity.boot_id.size() - 1), identity.boot_id.begin());
  struct stat network {};
  if (::stat("/proc/self/ns/net", &network) == 0) identity.network_namespace = network.st_ino;
  std::uint64_t none = 0;
  token.compare_exchange_strong(none, random_bits<std::uint64_t>());
  identity.token = token;
  return identity;
}

}  // namespace deep_ep
