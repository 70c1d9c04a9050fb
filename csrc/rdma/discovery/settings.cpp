#include "csrc/rdma/discovery/settings.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"

namespace deep_ep::rdma {
namespace {

constexpr std::array<std::string_view, 4> kWireNames = {"auto", "local", "verbs", "simulated"};
constexpr std::array<std::string_view, 4> kHandlerNames = {"auto", "gpu", "doorbell", "cpu"};
constexpr std::array<std::string_view, 3> kChoiceNames = {"auto", "0", "1"};

struct SimulatedKey {
  std::string_view name;
  double SimulatedNic::*value;
  std::string_view unit;
  double least;
  double most;
  bool whole = false;
};

constexpr SimulatedKey kSimulatedKeys[] = {
    {"rate", &SimulatedNic::gb_per_s, "GB/s; 0: no limit", 0, 1000},
    {"latency", &SimulatedNic::latency_us, "us", 0, 100000},
    {"reorder", &SimulatedNic::reorder_us, "us", 0, 100000},
    {"completion", &SimulatedNic::completion_us, "us", 0, 100000},
    {"rails", &SimulatedNic::rails, "ranks of a node; 0: no rails", 0, 128, true},
    {"slow", &SimulatedNic::slow, "the channel, counted from 1; 0: none", 0, 256, true},
    {"slow_rate", &SimulatedNic::slow_gb_per_s, "GB/s", 0.001, 1000},
    {"sms", &SimulatedNic::multiprocessors, "that a NIC takes", 1, 2, true},
};

void set_simulated_key(SimulatedNic& nic, std::string_view text) {
  const std::vector<std::string_view> parts = split(text, '=');
  const std::string_view name = parts.front();
  const auto* key = std::ranges::find(kSimulatedKeys, name, &SimulatedKey::name);
  if (key == std::end(kSimulatedKeys)) {
    std::vector<std::string_view> names;
    for (const SimulatedKey& one : kSimulatedKeys) names.push_back(one.name);
    fail<InvalidArgument>("simulated has no '{}', allowed: {}", name, fmt::join(names, ", "));
  }
  const auto value = parts.size() == 2 ? parse_number<double>(parts.back()) : std::nullopt;
  if (!value || !(*value >= key->least && *value <= key->most) || (key->whole && std::floor(*value) != *value)) {
    fail<InvalidArgument>("simulated: '{}', allowed: {}= a {}number from {} to {} ({})", text, name,
                          key->whole ? "whole " : "", key->least, key->most, key->unit);
  }
  nic.*key->value = *value;
}

using environment::Reader;
using environment::Value;

/// A choice whose words are the names of the values of an enum.
template <class Enum, std::size_t n>
Enum word(Reader& reader, const char* variable, const std::array<std::string_view, n>& names) {
  return static_cast<Enum>(std::ranges::find(names, reader.value(variable).text) - names.begin());
}

}  // namespace

std::string_view name_of(WireKind kind) { return kWireNames[static_cast<std::size_t>(kind)]; }
std::string_view name_of(NicHandler handler) { return kHandlerNames[static_cast<std::size_t>(handler)]; }
std::string_view name_of(Choice choice) { return kChoiceNames[static_cast<std::size_t>(choice)]; }

WireSetting parse_wire(std::string_view text) {
  const std::size_t colon = text.find(':');
  const auto* name = std::find(kWireNames.begin(), kWireNames.end(), text.substr(0, colon));
  WireSetting wire;
  if (name != kWireNames.end()) wire.kind = static_cast<WireKind>(name - kWireNames.begin());
  if (name == kWireNames.end() || (colon != std::string_view::npos && wire.kind != WireKind::simulated)) {
    throw InvalidArgument("not one of auto, local, verbs, simulated[:key=value,...]");
  }
  if (colon == std::string_view::npos) return wire;
  for (const std::string_view part : split(text.substr(colon + 1), ',')) set_simulated_key(wire.nic, part);
  return wire;
}

std::vector<ListedDevice> parse_mapping(const Value& value) {
  return trim(value.text).empty() ? std::vector<ListedDevice>() : parse_devices(value.text, ListOf::gpus);
}

DeviceFilter parse_nics(const Value& value) { return {value, /*prefixes=*/value.name == "NCCL_IB_HCA", ListOf::ports}; }

RdmaSettings read_settings(const environment::Source& source) {
  Reader reader{source};
  RdmaSettings settings;
  settings.mapping = reader.read("DEEP_EP_DEVICE_TO_HCA_MAPPING", parse_mapping);
  settings.nics = reader.read("DEEP_EP_HCA_LIST", parse_nics);
  settings.gid_index = reader.value("DEEP_EP_RDMA_GID_INDEX");
  settings.nic_handler = word<NicHandler>(reader, "DEEP_EP_NIC_HANDLER", kHandlerNames);
  settings.wire = reader.read("DEEP_EP_RDMA_WIRE", [](const Value& value) { return parse_wire(value.text); });
  settings.rail_only = word<Choice>(reader, "DEEP_EP_RAIL_ONLY", kChoiceNames);
  settings.relaxed_ordering = word<Choice>(reader, "DEEP_EP_RDMA_RELAXED_ORDERING", kChoiceNames);
  settings.dma_buf = reader.value("NVSHMEM_IB_DISABLE_DMABUF").text == "on";
  const Value traffic_class = reader.value("DEEP_EP_RDMA_TRAFFIC_CLASS");
  settings.has_traffic_class = !traffic_class.name.empty();
  settings.path = {
      .pkey_index = static_cast<std::uint16_t>(reader.value("NCCL_IB_PKEY").integer().value()),
      .traffic_class = static_cast<std::uint8_t>(traffic_class.integer().value()),
      .service_level = static_cast<std::uint8_t>(reader.value("DEEP_EP_RDMA_SERVICE_LEVEL").integer().value()),
      .ack_timeout = static_cast<std::uint8_t>(reader.value("DEEP_EP_RDMA_ACK_TIMEOUT").integer().value()),
      .retry_count = static_cast<std::uint8_t>(reader.value("DEEP_EP_RDMA_RETRY_COUNT").integer().value()),
  };
  settings.taken = reader.taken;
  settings.warnings = reader.ignored;
  return settings;
}

}  // namespace deep_ep::rdma
