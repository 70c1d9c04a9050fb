#include <cstdint>
#include <optional>

#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/rdma/verbs/queue_pair.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {
namespace {

/// The library's own variable where it is set, else what another library's variable said, else the own default.
std::uint8_t small_number(const char* variable, std::optional<int> of_others, std::uint64_t highest) {
  if (!environment::is_set(variable) && of_others && *of_others >= 0 &&
      static_cast<std::uint64_t>(*of_others) <= highest) {
    return static_cast<std::uint8_t>(*of_others);
  }
  const std::uint64_t value = environment::unsigned_integer(variable);
  if (value > highest) {
    fail<InvalidArgument>("environment variable {}='{}', allowed: 0 to {}", variable, environment::value(variable),
                          highest);
  }
  return static_cast<std::uint8_t>(value);
}

}  // namespace

PathOptions path_options(const RdmaSettings& settings, int port, int gid_index) {
  PathOptions path;
  path.port = port;
  path.gid_index = gid_index;
  path.pkey_index = static_cast<std::uint16_t>(settings.pkey_index.value_or(0));
  path.traffic_class = small_number("DEEP_EP_RDMA_TRAFFIC_CLASS", settings.traffic_class, 255);
  path.service_level = small_number("DEEP_EP_RDMA_SERVICE_LEVEL", settings.service_level, 15);
  path.ack_timeout = small_number("DEEP_EP_RDMA_ACK_TIMEOUT", settings.ack_timeout, 31);
  path.retry_count = small_number("DEEP_EP_RDMA_RETRY_COUNT", settings.retry_count, 7);
  return path;
}

}  // namespace deep_ep::rdma::verbs
