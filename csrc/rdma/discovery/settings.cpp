#include "csrc/rdma/discovery/settings.hpp"

#include <array>
#include <charconv>
#include <cstdlib>
#include <initializer_list>

#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {
namespace {

constexpr std::string_view kGidIndex = "DEEP_EP_RDMA_GID_INDEX";
constexpr std::string_view kWire = "DEEP_EP_RDMA_WIRE";
constexpr std::string_view kHandler = "DEEP_EP_NIC_HANDLER";

// The kernel's GID tables have 256 entries at most on today's devices; indices are 8 bits in address handles.
constexpr int kHighestGidIndex = 255;

std::optional<int> parse_int(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

class Reader {
 public:
  explicit Reader(const Environment& environment) : environment_(environment) {}

  RdmaSettings read() {
    if (const auto mapping = environment_("DEEP_EP_DEVICE_TO_HCA_MAPPING")) {
      settings_.mapping = parse_device_mapping(*mapping);
    }
    read_filter();
    read_gid_index();
    read_gid_filter();
    read_handler();
    read_wire();
    read_dma_buf();
    if (const auto level = environment_("NCCL_NET_GDR_LEVEL")) read_gdr_level(*level);
    settings_.traffic_class = first_number({"NVSHMEM_IB_TRAFFIC_CLASS", "NCCL_IB_TC"}, 0, 255);
    settings_.service_level = first_number({"EP_OVERRIDE_RDMA_SL", "NVSHMEM_IB_SL", "NCCL_IB_SL"}, 0, 15);
    settings_.ack_timeout = first_number({"NCCL_IB_TIMEOUT"}, 0, 31);
    settings_.retry_count = first_number({"NCCL_IB_RETRY_CNT"}, 0, 7);
    settings_.pkey_index = first_number({"NCCL_IB_PKEY"}, 0, 65535);
    return std::move(settings_);
  }

 private:
  void take(std::string_view name, std::string_view value) {
    settings_.taken.push_back(fmt::format("{}={}", name, value));
  }

  void ignore(std::string_view name, std::string_view value, std::string_view reason) {
    settings_.warnings.push_back(fmt::format("{}='{}' is ignored: {}", name, value, reason));
  }

  // The first of these variables that holds such a number; the others do not count then.
  std::optional<int> first_number(std::initializer_list<std::string_view> names, int least, int most) {
    for (const std::string_view name : names) {
      const auto value = environment_(name);
      if (!value) continue;
      const auto number = parse_int(*value);
      if (number && *number >= least && *number <= most) {
        take(name, *value);
        return number;
      }
      ignore(name, *value, fmt::format("not a number from {} to {}", least, most));
    }
    return std::nullopt;
  }

  void read_filter() {
    if (const auto list = environment_("DEEP_EP_HCA_LIST")) {
      settings_.nics = NicFilter::parse(*list, "DEEP_EP_HCA_LIST", false);
      return;
    }
    constexpr std::array<std::pair<std::string_view, bool>, 2> kLists = {
        {{"NVSHMEM_HCA_LIST", false}, {"NCCL_IB_HCA", true}}};
    for (const auto& [name, prefixes] : kLists) {
      const auto list = environment_(name);
      if (!list) continue;
      try {
        settings_.nics = NicFilter::parse(*list, std::string(name), prefixes);
        take(name, *list);
        return;
      } catch (const InvalidArgument& error) {
        ignore(name, *list, error.what());
      }
    }
  }

  void read_gid_index() {
    const auto own = environment_(kGidIndex);
    if (own && *own != "auto") {
      settings_.gid.index = parse_int(*own);
      if (!settings_.gid.index || *settings_.gid.index < 0 || *settings_.gid.index > kHighestGidIndex) {
        fail<InvalidArgument>("environment variable {}='{}', allowed: auto, or a number from 0 to {}", kGidIndex, *own,
                              kHighestGidIndex);
      }
      settings_.gid.index_source = kGidIndex;
      settings_.gid.index_is_binding = true;
    }
    if (own) return;
    for (const std::string_view name : {"NVSHMEM_IB_GID_INDEX", "NCCL_IB_GID_INDEX"}) {
      // -1 is both libraries' word for "choose".
      if (environment_(name) == "-1") continue;
      settings_.gid.index = first_number({name}, 0, kHighestGidIndex);
      settings_.gid.index_source = name;
      if (settings_.gid.index) return;
    }
  }

  void read_gid_filter() {
    for (const std::string_view name : {"NVSHMEM_IB_ADDR_FAMILY", "NCCL_IB_ADDR_FAMILY"}) {
      const auto family = environment_(name);
      if (!family || settings_.gid.family != GidPolicy::Family::any) continue;
      if (*family != "AF_INET" && *family != "AF_INET6") {
        ignore(name, *family, "neither AF_INET nor AF_INET6");
        continue;
      }
      settings_.gid.family = *family == "AF_INET" ? GidPolicy::Family::ipv4 : GidPolicy::Family::ipv6;
      take(name, *family);
    }
    for (const std::string_view name : {"NVSHMEM_IB_ADDR_RANGE", "NCCL_IB_ADDR_RANGE"}) {
      const auto text = environment_(name);
      // "::/0" is the other libraries' default: no restriction, for IPv4 neither.
      if (!text || settings_.gid.range || *text == "::/0") continue;
      settings_.gid.range = parse_address_range(*text);
      settings_.gid.range ? take(name, *text) : ignore(name, *text, "not an address range such as 10.0.0.0/8");
    }
    for (const std::string_view name : {"NVSHMEM_IB_ROCE_VERSION_NUM", "NCCL_IB_ROCE_VERSION_NUM"}) {
      const auto version = environment_(name);
      if (!version) continue;
      *version == "2"
          ? take(name, *version)
          : ignore(name, *version, fmt::format("only RoCE v2 is chosen by itself; {} may name another GID", kGidIndex));
    }
  }

  void read_handler() {
    const auto own = environment_(kHandler);
    if (own) {
      settings_.nic_handler = *own;
      if (*own != "auto" && *own != "gpu" && *own != "cpu") {
        fail<InvalidArgument>("environment variable {}='{}', allowed: auto, gpu or cpu", kHandler, *own);
      }
      return;
    }
    settings_.nic_handler = "auto";
    constexpr std::string_view kAlias = "NVSHMEM_IBGDA_NIC_HANDLER";
    const auto alias = environment_(kAlias);
    if (!alias) return;
    if (*alias != "auto" && *alias != "gpu" && *alias != "cpu" && *alias != "cpu_host_memory") {
      ignore(kAlias, *alias, "not auto, gpu, cpu or cpu_host_memory");
      return;
    }
    settings_.nic_handler = alias->substr(0, alias->find('_'));
    take(kAlias, *alias);
  }

  void read_wire() {
    settings_.wire = environment_(kWire).value_or("auto");
    if (settings_.wire != "auto" && settings_.wire != "local" && settings_.wire != "verbs") {
      fail<InvalidArgument>("environment variable {}='{}', allowed: auto, local or verbs", kWire, settings_.wire);
    }
  }

  void read_dma_buf() {
    if (const auto off = environment_("NVSHMEM_IB_DISABLE_DMABUF"); off && *off != "0" && *off != "false") {
      settings_.dma_buf = false;
      take("NVSHMEM_IB_DISABLE_DMABUF", *off);
    } else if (const auto on = environment_("NCCL_DMABUF_ENABLE"); on == "0") {
      settings_.dma_buf = false;
      take("NCCL_DMABUF_ENABLE", *on);
    }
  }

  void read_gdr_level(const std::string& level) {
    settings_.gpu_direct_limit = topology::parse_proximity(level);
    settings_.gpu_direct_limit ? take("NCCL_NET_GDR_LEVEL", level)
                               : ignore("NCCL_NET_GDR_LEVEL", level, "not LOC, PIX, PXB, PHB, NODE or SYS");
  }

  const Environment& environment_;
  RdmaSettings settings_;
};

}  // namespace

std::optional<std::string> process_environment(std::string_view name) {
  if (name.starts_with("DEEP_EP_")) {
    return environment::is_set(name) ? std::optional(environment::value(name)) : std::nullopt;
  }
  const char* value = std::getenv(std::string(name).c_str());
  return value != nullptr && *value != '\0' ? std::optional<std::string>(value) : std::nullopt;
}

RdmaSettings read_settings(const Environment& environment) { return Reader(environment).read(); }

}  // namespace deep_ep::rdma
