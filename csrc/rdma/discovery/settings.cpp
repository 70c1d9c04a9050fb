#include "csrc/rdma/discovery/settings.hpp"

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {
namespace {

using environment::Reader;
using environment::Value;

// The kernel's GID tables have 256 entries at most on today's devices; indices are 8 bits in address handles.
constexpr int kHighestGidIndex = 255;

NicHandler read_handler(Reader& reader) {
  const std::string word = reader.choice("DEEP_EP_NIC_HANDLER");
  return word == "auto" ? NicHandler::automatic : word == "gpu" ? NicHandler::gpu : NicHandler::cpu;
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

AddressRange parse_range(const Value& value) {
  if (auto range = parse_address_range(value.text)) return *range;
  throw InvalidArgument("not an address range such as 10.0.0.0/8");
}

GidPolicy read_gid(Reader& reader) {
  GidPolicy policy = reader.read("DEEP_EP_RDMA_GID_INDEX", parse_gid_index).value_or(GidPolicy{});
  const std::string family = reader.choice("NVSHMEM_IB_ADDR_FAMILY");
  if (!family.empty()) policy.family = family == "AF_INET" ? GidPolicy::Family::ipv4 : GidPolicy::Family::ipv6;
  policy.range = reader.read("NVSHMEM_IB_ADDR_RANGE", parse_range);
  // Nothing follows from it: only that another version is not understood.
  reader.read("NVSHMEM_IB_ROCE_VERSION_NUM", [](const Value& value) {
    if (value.text == "2") return true;
    throw InvalidArgument("only RoCE v2 is chosen automatically; DEEP_EP_RDMA_GID_INDEX may name another GID");
  });
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

RdmaSettings read_settings(const environment::Source& source) {
  Reader reader(source);
  RdmaSettings settings;
  settings.mapping =
      reader.read("DEEP_EP_DEVICE_TO_HCA_MAPPING", [](const Value& value) { return parse_device_mapping(value.text); })
          .value_or(std::vector<MappingEntry>{});
  settings.nics = reader.read("DEEP_EP_HCA_LIST", parse_filter).value_or(NicFilter());
  settings.gid = read_gid(reader);
  settings.nic_handler = read_handler(reader);
  settings.wire = reader.read("DEEP_EP_RDMA_WIRE", [](const Value& value) { return parse_wire(value.text); })
                      .value_or(WireSetting{});
  settings.dma_buf = reader.choice("NVSHMEM_IB_DISABLE_DMABUF") == "on";
  settings.data_direct = reader.choice("DEEP_EP_DATA_DIRECT") == "on";
  settings.gpu_direct_limit = topology::parse_proximity(reader.choice("NCCL_NET_GDR_LEVEL"));
  settings.path = read_path(reader);
  settings.has_traffic_class = reader.is_set("DEEP_EP_RDMA_TRAFFIC_CLASS");
  settings.taken = reader.taken();
  settings.warnings = reader.ignored();
  return settings;
}

}  // namespace deep_ep::rdma
