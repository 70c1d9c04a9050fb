// Which process, host and network namespace a rank lives in: this decides how ranks can hand memory to each other.
#pragma once

#include <array>
#include <cstdint>

namespace deep_ep {

/// Plain data, exchanged through the bootstrap. Zero where the system does not tell.
struct ProcessIdentity {
  std::array<char, 40> boot_id{};       ///< differs between hosts and boots, equal in all containers of a host
  std::array<char, 64> host{};          ///< for messages; containers of one host may have different names
  std::uint64_t network_namespace = 0;  ///< abstract unix sockets reach no farther
  /// Drawn at random by each process. A process id would not do: two containers may both have a process 7.
  std::uint64_t token = 0;

  bool same_host(const ProcessIdentity& other) const { return boot_id == other.boot_id; }
  bool same_network(const ProcessIdentity& other) const {
    return same_host(other) && network_namespace == other.network_namespace;
  }
  bool same_process(const ProcessIdentity& other) const { return same_host(other) && token == other.token; }
};

ProcessIdentity this_process();

}  // namespace deep_ep
