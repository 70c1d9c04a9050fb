#include <cstdint>
#include <limits>

#include "csrc/rdma/verbs/queue_pair.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {
namespace {

std::uint8_t small_number(const char* variable, std::uint64_t highest) {
  const std::uint64_t value = environment::unsigned_integer(variable);
  if (value > highest) {
    fail<InvalidArgument>("environment variable {}='{}', allowed: 0 to {}", variable, environment::value(variable),
                          highest);
  }
  return static_cast<std::uint8_t>(value);
}

}  // namespace

PathOptions path_options_from_environment(int port, int gid_index) {
  PathOptions path;
  path.port = port;
  path.gid_index = gid_index;
  path.traffic_class = small_number("DEEP_EP_RDMA_TRAFFIC_CLASS", 255);
  path.service_level = small_number("DEEP_EP_RDMA_SERVICE_LEVEL", 15);
  path.ack_timeout = small_number("DEEP_EP_RDMA_ACK_TIMEOUT", 31);
  path.retry_count = small_number("DEEP_EP_RDMA_RETRY_COUNT", 7);
  return path;
}

}  // namespace deep_ep::rdma::verbs
