#include "tools/common/variables.hpp"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "csrc/bootstrap/interfaces.hpp"
#include "csrc/control/sockets.hpp"
#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep::tools {
namespace {

/// How many letters must be put in, taken out or changed to make one word of the other.
std::size_t edits_between(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

using environment::Value;

/// Texts, and the function that refuses wrong ones.
constexpr std::pair<std::string_view, void (*)(const Value&)> kTexts[] = {
    {"DEEP_EP_CONTROL_PORTS", [](const Value& value) { control::parse_ports(value.text); }},
    {"DEEP_EP_DEVICE_TO_HCA_MAPPING", [](const Value& value) { rdma::parse_mapping(value); }},
    {"DEEP_EP_HCA_LIST", [](const Value& value) { rdma::parse_nics(value); }},
    {"DEEP_EP_RDMA_WIRE", [](const Value& value) { rdma::parse_wire(value.text); }},
    {"DEEP_EP_SOCKET_IFNAME", [](const Value& value) { parse_interfaces(value); }},
};

// Scripts of this repository hand these to each other, and to the tests.
bool of_development(std::string_view name) {
  constexpr std::string_view kNames[] = {"DEEP_EP_WHEEL", "DEEP_EP_MUTANT"};
  return name.starts_with("DEEP_EP_TEST_") || std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

}  // namespace

std::vector<UnknownVariable> unknown_of(std::span<const std::string> names) {
  std::vector<std::string_view> known;
  for (const environment::Variable& variable : environment::variables()) {
    if (environment::is_own(variable.name())) known.push_back(variable.name());
  }
  std::vector<UnknownVariable> unknown;
  for (const std::string& name : names) {
    if (!environment::is_own(name) || of_development(name)) continue;
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const auto nearest = std::min_element(known.begin(), known.end(), [&](std::string_view a, std::string_view b) {
      return edits_between(a, name) < edits_between(b, name);
    });
    unknown.push_back({name, *nearest});
  }
  return unknown;
}

std::vector<std::string> names_of_process() {
  std::vector<std::string> names;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    names.emplace_back(text.substr(0, text.find('=')));
  }
  return names;
}

environment::Value value_of(environment::Reader& reader, std::string_view name) {
  for (const auto& [text, judge] : kTexts) {
    if (text == name) return reader.value(name, judge);
  }
  return reader.value(name);
}

void check_environment() {
  environment::Reader reader;
  for (const environment::Variable& variable : environment::variables()) value_of(reader, variable.name());
  for (const UnknownVariable& unknown : unknown_of(names_of_process())) {
    log::warn("{} is set, but there is no such variable: did you mean {}?", unknown.name, unknown.nearest);
  }
}

}  // namespace deep_ep::tools
