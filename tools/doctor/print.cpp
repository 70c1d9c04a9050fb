#include "tools/doctor/print.hpp"

#include <fmt/format.h>

namespace deep_ep::tools {
namespace {

using nlohmann::json;

std::string or_else(const std::string& text, const char* otherwise) { return text.empty() ? otherwise : text; }

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string numa(const topology::PciLocation& pci) {
  return pci.numa_node < 0 ? "NUMA node not known" : fmt::format("NUMA node {}", pci.numa_node);
}

std::string kernel_of(const Patient& patient) { return patient.root.read("/proc/sys/kernel/osrelease").value_or(""); }

std::string driver_of(const Patient& patient) {
  return first_line(patient.root.read("/proc/driver/nvidia/version").value_or(""));
}

// Whether the GPUs' rows use this GID.
bool is_chosen(const Patient& patient, const rdma::Nic& nic, const rdma::NicPort& port, const rdma::GidEntry& gid) {
  for (const rdma::NicMapRow& row : patient.map.rows) {
    if (row.port && patient.map.nics[row.port->nic].name == nic.name && row.port->port == port.number) {
      return row.port->gid.index == gid.index;
    }
  }
  const rdma::GidChoice choice = rdma::choose_gid(port.gids, port.ethernet(), patient.settings.gid);
  return choice.gid && choice.gid->index == gid.index;
}

void add_nic(const Patient& patient, const rdma::Nic& nic, std::string& text) {
  text += fmt::format("  {}{}: {}, firmware {}, {}, {}{}; {}\n", nic.name,
                      nic.pci.address ? fmt::format(" ({})", nic.pci.address->text()) : "",
                      or_else(nic.driver, "unknown driver"), or_else(nic.firmware, "not known"), numa(nic.pci),
                      nic.uverbs.empty() ? "no device file" : "/dev/infiniband/" + nic.uverbs,
                      nic.virtual_function ? ", virtual function" : "", name_of(nic.capability));
  for (const rdma::NicPort& port : nic.ports) {
    text += fmt::format("    port {}: {}, link {}, {} Gb/s, {}\n", port.number, port.state, port.physical_state,
                        port.rate_gbps, port.link_layer);
    for (const rdma::GidEntry& gid : port.gids) {
      text += fmt::format("      GID {}: {}, {}{}{}{}\n", gid.index, name_of(gid.type), gid.address(),
                          gid.netdev.empty() ? "" : ", ", gid.netdev,
                          is_chosen(patient, nic, port, gid) ? "  <- used" : "");
    }
  }
}

json nic_json(const Patient& patient, const rdma::Nic& nic) {
  json ports = json::array();
  for (const rdma::NicPort& port : nic.ports) {
    json gids = json::array();
    for (const rdma::GidEntry& gid : port.gids) {
      gids.push_back({{"index", gid.index},
                      {"type", name_of(gid.type)},
                      {"address", gid.address()},
                      {"netdev", gid.netdev},
                      {"used", is_chosen(patient, nic, port, gid)}});
    }
    ports.push_back({{"number", port.number},
                     {"state", port.state},
                     {"link", port.physical_state},
                     {"gbps", port.rate_gbps},
                     {"link_layer", port.link_layer},
                     {"gids", gids}});
  }
  return {{"name", nic.name},
          {"pci", nic.pci.address ? json(nic.pci.address->text()) : json()},
          {"numa_node", nic.pci.numa_node},
          {"driver", nic.driver},
          {"firmware", nic.firmware},
          {"board", nic.board},
          {"device_file", nic.uverbs.empty() ? "" : "/dev/infiniband/" + nic.uverbs},
          {"accessible", nic.accessible},
          {"virtual_function", nic.virtual_function},
          {"mlx5", nic.capability == rdma::Capability::mlx5},
          {"supported", nic.capability != rdma::Capability::unsupported},
          {"ports", ports}};
}

/// For each GPU which others it reaches by NVLink, and its domain; null where that is not known.
json nvlink_json(const Patient& patient) {
  json list = json::array();
  if (!patient.live_gpus) return list;
  for (const LiveGpu& gpu : *patient.live_gpus) {
    json reaches = json::array();
    for (const auto& reached : gpu.reaches) reaches.push_back(reached ? json(*reached) : json());
    list.push_back({{"pci", gpu.pci},
                    {"links_up", gpu.links},
                    {"links_down", gpu.links_down},
                    {"reaches", reaches},
                    {"domain", gpu.fabric && !gpu.fabric->cluster.empty() ? json(gpu.fabric->text()) : json()}});
  }
  return list;
}

json row_json(const rdma::NicMap& map, std::size_t gpu) {
  const rdma::NicMapRow& row = map.rows[gpu];
  json result = {{"gpu", map.gpus[gpu].cuda_id ? json(*map.gpus[gpu].cuda_id) : json()},
                 {"gpu_pci", map.gpus[gpu].pci.address ? json(map.gpus[gpu].pci.address->text()) : json()},
                 {"nic", json()},
                 {"problem", row.problem}};
  if (!row.port) return result;
  result["nic"] = map.nics[row.port->nic].name;
  result["port"] = row.port->port;
  result["gid_index"] = row.port->gid.index;
  result["distance"] = topology::short_name(row.distance.proximity);
  result["from_mapping"] = row.from_mapping;
  return result;
}

}  // namespace

std::string machine_text(const Patient& patient) {
  std::string text = fmt::format("Kernel {}; driver: {}\n", or_else(kernel_of(patient), "not known"),
                                 or_else(driver_of(patient), "none"));
  text += fmt::format("\nGPUs: {}\n", patient.gpus.empty() ? "none" : "");
  for (const topology::Gpu& gpu : patient.gpus) {
    text += fmt::format("  {}: {}, {}, {}\n", gpu.text(), or_else(gpu.model, "model not known"),
                        or_else(gpu.uuid, "UUID not known"), numa(gpu.pci));
  }
  if (patient.live_gpus) text += nvlink_table(*patient.live_gpus);
  text += fmt::format("\nNICs: {}\n", patient.nics.empty() ? "none" : "");
  for (const rdma::Nic& nic : patient.nics) add_nic(patient, nic, text);
  if (!patient.map.rows.empty()) {
    text += "\nGPU to NIC (PIX same switch, PXB several switches, PHB host bridge, NODE, SYS across NUMA nodes)\n";
    for (std::size_t gpu = 0; gpu < patient.map.rows.size(); ++gpu)
      text += fmt::format("  {}\n", patient.map.line(gpu));
  }
  if (!patient.map.unused.empty() && !patient.map.rows.empty()) {
    text += "\nNICs that no GPU uses\n";
    for (const std::string& line : patient.map.unused) text += fmt::format("  {}\n", line);
  }
  return text;
}

json machine_json(const Patient& patient) {
  json gpus = json::array();
  for (const topology::Gpu& gpu : patient.gpus) {
    gpus.push_back({{"cuda_id", gpu.cuda_id ? json(*gpu.cuda_id) : json()},
                    {"pci", gpu.pci.address ? json(gpu.pci.address->text()) : json()},
                    {"numa_node", gpu.pci.numa_node},
                    {"uuid", gpu.uuid},
                    {"model", gpu.model}});
  }
  json nics = json::array();
  for (const rdma::Nic& nic : patient.nics) nics.push_back(nic_json(patient, nic));
  json map = json::array();
  for (std::size_t gpu = 0; gpu < patient.map.rows.size(); ++gpu) map.push_back(row_json(patient.map, gpu));
  return {{"kernel", kernel_of(patient)},
          {"driver", driver_of(patient)},
          {"gpus", gpus},
          {"nics", nics},
          {"map", map},
          {"unused_nics", patient.map.unused},
          {"nvlink", nvlink_json(patient)}};
}

json findings_json(const Findings& findings) {
  json list = json::array();
  for (const Finding& finding : findings) {
    list.push_back({{"id", finding.id},
                    {"check", finding.check},
                    {"verdict", name_of(finding.verdict)},
                    {"found", finding.found},
                    {"meaning", finding.meaning},
                    {"action", finding.action}});
  }
  return list;
}

std::string printable(std::string text) {
  for (char& c : text) {
    const auto code = static_cast<unsigned char>(c);
    if ((code < 0x20 && c != '\n' && c != '\t') || code == 0x7f) c = '?';
  }
  return text;
}

}  // namespace deep_ep::tools
