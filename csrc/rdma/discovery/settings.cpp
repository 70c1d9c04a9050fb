#include "csrc/rdma/discovery/settings.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>
#include <variant>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {
namespace {

constexpr std::array<std::string_view, 4> kWireNames = {"auto", "local", "verbs", "simulated"};
constexpr std::array<std::string_view, 4> kHandlerNames = {"auto", "gpu", "doorbell", "cpu"};
constexpr std::array<std::string_view, 3> kChoiceNames = {"auto", "0", "1"};

struct SimulatedKey {
  std::string_view name;
  std::string_view unit;
  double least;
  double most;
  std::variant<int SimulatedNic::*, double SimulatedNic::*, std::optional<double> SimulatedNic::*> value;
  bool or_zero = false;  ///< 0 is allowed besides
};

constexpr std::array kSimulatedKeys = {
    SimulatedKey{"rate", "GB/s; or 0, no limit", 0.01, 1000, &SimulatedNic::gb_per_s, true},
    SimulatedKey{"latency", "us", 0, 100000, &SimulatedNic::latency_us},
    SimulatedKey{"atomics", "of a queue pair under way", 1, 32, &SimulatedNic::most_adds},
    SimulatedKey{"overhead", "bytes of a message", 0, 4096, &SimulatedNic::overhead_bytes},
    SimulatedKey{"reorder", "us", 0, 100000, &SimulatedNic::reorder_us},
    SimulatedKey{"completion", "us", 0, 100000, &SimulatedNic::completion_us},
    SimulatedKey{"rails", "ranks of a node; or 0, no rails", 0, 128, &SimulatedNic::rails},
    SimulatedKey{"receive", "GB/s; or 0, no limit", 0.001, 1000, &SimulatedNic::receive_gb_per_s, true},
    SimulatedKey{"slow", "the channel, counted from 1; or 0, none", 1, 256, &SimulatedNic::slow, true},
    SimulatedKey{"slow_rate", "GB/s", 0.001, 1000, &SimulatedNic::slow_gb_per_s},
    SimulatedKey{"sms", "that a NIC takes", 1, 2, &SimulatedNic::multiprocessors},
};

void set_simulated_key(SimulatedNic& nic, std::string_view text) {
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
  const auto value =
      equals == std::string_view::npos ? std::nullopt : parse_number<double>(trim(text.substr(equals + 1)));
  const bool whole = std::holds_alternative<int SimulatedNic::*>(key->value);
  const auto allowed = [&](double one) {
    if (one == 0 && key->or_zero) return true;
    return one >= key->least && one <= key->most && !(whole && std::floor(one) != one);
  };
  if (!value || !allowed(*value)) {
    fail<InvalidArgument>("simulated: '{}', allowed: {}= a {}number from {} to {} ({})", text, name,
                          whole ? "whole " : "", key->least, key->most, key->unit);
  }
  std::visit(
      [&](auto member) {
        if constexpr (std::is_same_v<decltype(member), int SimulatedNic::*>) {
          nic.*member = static_cast<int>(*value);
        } else {
          nic.*member = *value;
        }
      },
      key->value);
}

using environment::Reader;
using environment::Value;

// The kernel's GID tables have 256 entries at most on today's devices; indices are 8 bits in address handles.
constexpr int kHighestGidIndex = 255;

/// A choice whose words are the names of the values of an enum.
template <class Enum, std::size_t n>
Enum word(Reader& reader, const char* variable, const std::array<std::string_view, n>& names) {
  return static_cast<Enum>(std::ranges::find(names, reader.choice(variable)) - names.begin());
}

NicFilter parse_filter(const Value& value) {
  return NicFilter::parse(value.text, std::string(value.name), /*prefixes=*/value.name == "NCCL_IB_HCA");
}

GidPolicy parse_gid_index(const Value& value) {
  GidPolicy policy;
  if (value.text == "auto" && environment::is_own(value.name)) return policy;
  policy.index = parse_number<int>(value.text);
  if (!policy.index || *policy.index < 0 || *policy.index > kHighestGidIndex) {
    fail<InvalidArgument>("not {}a number from 0 to {}", environment::is_own(value.name) ? "auto, nor " : "",
                          kHighestGidIndex);
  }
  policy.index_source = value.name;
  policy.index_is_binding = environment::is_own(value.name);
  return policy;
}

PathOptions read_path(Reader& reader) {
  PathOptions path;
  path.traffic_class = static_cast<std::uint8_t>(reader.unsigned_integer("DEEP_EP_RDMA_TRAFFIC_CLASS"));
  path.service_level = static_cast<std::uint8_t>(reader.unsigned_integer("DEEP_EP_RDMA_SERVICE_LEVEL"));
  path.ack_timeout = static_cast<std::uint8_t>(reader.unsigned_integer("DEEP_EP_RDMA_ACK_TIMEOUT"));
  path.retry_count = static_cast<std::uint8_t>(reader.unsigned_integer("DEEP_EP_RDMA_RETRY_COUNT"));
  path.pkey_index = static_cast<std::uint16_t>(reader.unsigned_integer("NCCL_IB_PKEY"));
  return path;
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

RdmaSettings read_settings(const environment::Source& source) {
  Reader reader(source);
  RdmaSettings settings;
  settings.mapping =
      reader.read("DEEP_EP_DEVICE_TO_HCA_MAPPING", [](const Value& value) { return parse_device_mapping(value.text); })
          .value_or(std::vector<MappingEntry>{});
  settings.nics = reader.read("DEEP_EP_HCA_LIST", parse_filter).value_or(NicFilter());
  settings.gid = reader.read("DEEP_EP_RDMA_GID_INDEX", parse_gid_index).value_or(GidPolicy{});
  settings.nic_handler = word<NicHandler>(reader, "DEEP_EP_NIC_HANDLER", kHandlerNames);
  settings.wire = reader.read("DEEP_EP_RDMA_WIRE", [](const Value& value) { return parse_wire(value.text); })
                      .value_or(WireSetting{});
  settings.rail_only = word<Choice>(reader, "DEEP_EP_RAIL_ONLY", kChoiceNames);
  settings.relaxed_ordering = word<Choice>(reader, "DEEP_EP_RDMA_RELAXED_ORDERING", kChoiceNames);
  settings.dma_buf = reader.choice("NVSHMEM_IB_DISABLE_DMABUF") == "on";
  settings.path = read_path(reader);
  settings.has_traffic_class = reader.is_set("DEEP_EP_RDMA_TRAFFIC_CLASS");
  settings.taken = reader.taken();
  settings.warnings = reader.ignored();
  return settings;
}

}  // namespace deep_ep::rdma
