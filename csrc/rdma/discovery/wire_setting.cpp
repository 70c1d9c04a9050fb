#include "csrc/rdma/discovery/wire_setting.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {
namespace {

constexpr std::array<std::string_view, 4> kWireNames = {"auto", "local", "verbs", "simulated"};

struct SimulatedKey {
  std::string_view name;
  std::string_view unit;
  double least;
  double most;
  bool whole;
  bool or_zero;  ///< 0 is allowed besides
  void (*set)(SimulatedNic&, double);
};

constexpr std::array kSimulatedKeys = {
    SimulatedKey{"rate", "GB/s; or 0, no limit", 0.01, 1000, false, true,
                 [](SimulatedNic& nic, double value) { nic.gb_per_s = value; }},
    SimulatedKey{"latency", "us", 0, 100000, false, false,
                 [](SimulatedNic& nic, double value) { nic.latency_us = value; }},
    SimulatedKey{"atomics", "of a queue pair under way", 1, 32, true, false,
                 [](SimulatedNic& nic, double value) { nic.most_adds = static_cast<std::uint32_t>(value); }},
    SimulatedKey{"overhead", "bytes of a message", 0, 4096, true, false,
                 [](SimulatedNic& nic, double value) { nic.overhead_bytes = static_cast<std::uint32_t>(value); }},
    SimulatedKey{"reorder", "us", 0, 100000, false, false,
                 [](SimulatedNic& nic, double value) { nic.reorder_us = value; }},
    SimulatedKey{"completion", "us", 0, 100000, false, false,
                 [](SimulatedNic& nic, double value) { nic.completion_us = value; }},
    SimulatedKey{"sms", "that a NIC takes", 1, 2, true, false,
                 [](SimulatedNic& nic, double value) { nic.multiprocessors = static_cast<int>(value); }},
};

/// `said`: a bit for each key that was.
void set_simulated_key(SimulatedNic& nic, std::uint32_t& said, std::string_view text) {
  const std::size_t equals = text.find('=');
  const std::string_view name = trim(text.substr(0, equals));
  const auto* key = std::find_if(kSimulatedKeys.begin(), kSimulatedKeys.end(),
                                 [&](const SimulatedKey& one) { return one.name == name; });
  if (key == kSimulatedKeys.end()) {
    std::array<std::string_view, kSimulatedKeys.size()> names;
    std::transform(kSimulatedKeys.begin(), kSimulatedKeys.end(), names.begin(),
                   [](const SimulatedKey& one) { return one.name; });
    fail<InvalidArgument>("simulated has no '{}', allowed: {}", name, fmt::join(names, ", "));
  }
  const std::uint32_t bit = std::uint32_t{1} << (key - kSimulatedKeys.begin());
  if ((said & bit) != 0) fail<InvalidArgument>("simulated: '{}' comes twice, allowed: once", name);
  said |= bit;
  const auto value =
      equals == std::string_view::npos ? std::nullopt : parse_number<double>(trim(text.substr(equals + 1)));
  const auto allowed = [&](double one) {
    if (one == 0 && key->or_zero) return true;
    return one >= key->least && one <= key->most && !(key->whole && std::floor(one) != one);
  };
  if (!value || !allowed(*value)) {
    fail<InvalidArgument>("simulated: '{}', allowed: {}= a {}number from {} to {} ({})", text, name,
                          key->whole ? "whole " : "", key->least, key->most, key->unit);
  }
  key->set(nic, *value);
}

}  // namespace

std::string_view name_of(WireKind kind) { return kWireNames[static_cast<std::size_t>(kind)]; }

WireSetting parse_wire(std::string_view text) {
  const std::size_t colon = text.find(':');
  const auto* name = std::find(kWireNames.begin(), kWireNames.end(), text.substr(0, colon));
  WireSetting wire;
  if (name != kWireNames.end()) wire.kind = static_cast<WireKind>(name - kWireNames.begin());
  if (name == kWireNames.end() || (colon != std::string_view::npos && wire.kind != WireKind::simulated)) {
    throw InvalidArgument("not one of auto, local, verbs, simulated[:key=value,...]");
  }
  if (colon == std::string_view::npos) return wire;
  std::uint32_t said = 0;
  for (const std::string_view part : split(text.substr(colon + 1), ',')) set_simulated_key(wire.nic, said, part);
  return wire;
}

}  // namespace deep_ep::rdma
