#include "csrc/rdma/discovery/device_mapping.hpp"

#include <algorithm>
#include <cctype>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {
namespace {

constexpr std::string_view kMappingGrammar = "<CUDA id or GPU UUID>:<hca>[:<port>],...";
constexpr std::string_view kListGrammar = "[^]<hca>[:<port>],...";

// InfiniBand numbers ports from 1 to 254.
constexpr int kMostPorts = 254;

// Where in a list something is wrong.
struct MapEntry {
  std::string_view grammar;
  std::size_t entry;
  std::string_view text;

  [[noreturn]] void refuse(const std::string& reason) const {
    fail<InvalidArgument>("entry {}, '{}': {}; allowed: {}", entry, text, reason, grammar);
  }
};

std::string parse_hca(const MapEntry& place, std::string_view text) {
  if (text.empty()) place.refuse("the HCA is missing");
  for (const char c : text) {
    if (std::isspace(static_cast<unsigned char>(c)) != 0 || c == '/') {
      place.refuse(fmt::format("'{}' is not the name of an HCA", text));
    }
  }
  return std::string(text);
}

int parse_port(const MapEntry& place, std::string_view text) {
  const auto port = parse_number<int>(text);
  if (!port || *port < 1 || *port > kMostPorts) {
    place.refuse(fmt::format("the port is '{}', not a number from 1 to {}", text, kMostPorts));
  }
  return *port;
}

void parse_gpu(const MapEntry& place, std::string_view text, MappingEntry& entry) {
  if (text.empty()) place.refuse("the GPU is missing");
  if (text.starts_with("MIG-")) {
    place.refuse(fmt::format("'{}' is a part of a GPU (MIG); name the GPU", text));
  }
  if (text.starts_with("GPU-")) {
    const std::string_view digits = text.substr(4);
    const bool well_formed =
        !digits.empty() && digits.size() <= 36 && std::all_of(digits.begin(), digits.end(), [](char c) {
          return std::isxdigit(static_cast<unsigned char>(c)) != 0 || c == '-';
        });
    if (!well_formed) place.refuse(fmt::format("'{}' is not a GPU UUID", text));
    entry.uuid = text;
    return;
  }
  entry.cuda_id = parse_number<int>(text);
  if (!entry.cuda_id || *entry.cuda_id < 0)
    place.refuse(fmt::format("'{}' is neither a CUDA id nor a GPU UUID (GPU-...)", text));
}

}  // namespace

std::vector<MappingEntry> parse_device_mapping(std::string_view text) {
  std::vector<MappingEntry> entries;
  if (trim(text).empty()) return entries;
  MapEntry place{kMappingGrammar, 0, {}};
  for (const std::string_view part : split(text, ',')) {
    ++place.entry;
    place.text = part;
    if (part.empty()) place.refuse("it is empty");
    const std::vector<std::string_view> fields = split(part, ':');
    if (fields.size() < 2) place.refuse("there is no ':' between GPU and HCA");
    if (fields.size() > 3) place.refuse(fmt::format("it has {} parts, at most 3 are allowed", fields.size()));
    MappingEntry entry;
    entry.text = part;
    parse_gpu(place, fields[0], entry);
    entry.hca = parse_hca(place, fields[1]);
    if (fields.size() == 3) entry.port = parse_port(place, fields[2]);
    for (const MappingEntry& other : entries) {
      if (other.cuda_id == entry.cuda_id && other.uuid == entry.uuid && other.hca == entry.hca &&
          other.port == entry.port) {
        place.refuse("it comes twice");
      }
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

NicFilter NicFilter::parse(std::string_view text, std::string source, bool prefixes) {
  NicFilter filter;
  filter.text_ = trim(text);
  if (filter.text_.empty()) return filter;
  filter.source_ = std::move(source);
  filter.prefixes_ = prefixes;
  std::string_view rest = filter.text_;
  if (rest.starts_with('^')) {
    filter.exclude_ = true;
    rest.remove_prefix(1);
  }
  if (prefixes && rest.starts_with('=')) {
    filter.prefixes_ = false;
    rest.remove_prefix(1);
  }
  MapEntry place{kListGrammar, 0, {}};
  for (const std::string_view part : split(rest, ',')) {
    ++place.entry;
    place.text = part;
    if (part.empty()) place.refuse("it is empty");
    if (part.starts_with('=')) place.refuse("'=' is NCCL's notation; here names are always complete");
    if (part.starts_with('^')) place.refuse("'^' may appear once, at the beginning of the list");
    const std::vector<std::string_view> fields = split(part, ':');
    if (fields.size() > 2) place.refuse(fmt::format("it has {} parts, at most 2 are allowed", fields.size()));
    Item item{parse_hca(place, fields[0]), std::nullopt};
    if (fields.size() == 2) item.port = parse_port(place, fields[1]);
    filter.items_.push_back(std::move(item));
  }
  return filter;
}

bool NicFilter::allows(std::string_view hca, int port) const {
  if (!is_set()) return true;
  const bool listed = std::any_of(items_.begin(), items_.end(), [&](const Item& item) {
    return names(item, hca) && item.port.value_or(port) == port;
  });
  return listed != exclude_;
}

std::vector<std::string> NicFilter::without_match(std::span<const std::string> hcas) const {
  std::vector<std::string> found;
  for (const Item& item : items_) {
    const auto same = [&](const std::string& hca) { return names(item, hca); };
    if (std::none_of(hcas.begin(), hcas.end(), same)) found.push_back(item.hca);
  }
  return found;
}

}  // namespace deep_ep::rdma
