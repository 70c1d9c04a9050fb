// Settings for ranks whose NICs are soft-RoCE devices.
#pragma once

#include "csrc/rdma/discovery/settings.hpp"

namespace deep_ep::test {

/// Sends a packet again after 0.27 s as often as it takes, so that a busy machine does not look like a dead peer.
inline rdma::RdmaSettings patient_settings() {
  rdma::RdmaSettings settings = rdma::read_settings();
  settings.wire.kind = rdma::WireKind::verbs;
  settings.path.ack_timeout = 16;
  settings.path.retry_count = 7;  // what soft-RoCE takes for "for ever"
  return settings;
}

/// Gives up after 7 x 0.27 s.
inline rdma::RdmaSettings quick_settings() {
  rdma::RdmaSettings settings = patient_settings();
  settings.path.retry_count = 6;
  return settings;
}

}  // namespace deep_ep::test
