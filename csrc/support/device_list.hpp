// Lists in which operators name devices of a machine: NICs, network interfaces, the NICs of GPUs.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/support/environment.hpp"

namespace deep_ep {

/// An entry of such a list; white space around each of its parts is ignored.
struct ListEntry {
  std::string_view grammar;  ///< of the list, for messages
  std::size_t number;        ///< counted from 1
  std::string_view text;

  /// InvalidArgument: which entry is wrong, why, and what is allowed.
  [[noreturn]] void refuse(const std::string& reason) const;
  /// What stands between colons. These refuse what they cannot read.
  std::vector<std::string_view> parts(std::size_t least, std::size_t most) const;
  std::string device(std::string_view part) const;
  int port(std::string_view part) const;
};
std::vector<ListEntry> list_entries(std::string_view text, std::string_view grammar);

/// Which NICs, or network interfaces, may be used.
class DeviceFilter {
 public:
  DeviceFilter() = default;  ///< all of them
  /// `<name>[:<port>],...`, or, beginning with ^, those that must not be used. `prefixes`: names are beginnings of
  /// names unless the list has = in front, behind the ^ if there is one (NCCL's notation). InvalidArgument says what is
  /// wrong.
  /// `ports`: entries may have one; else a colon belongs to a name, as in the labels of interfaces.
  DeviceFilter(const environment::Value& value, bool prefixes, bool ports);

  bool allows(std::string_view name, int port = 1) const;
  /// Names of the list that none of `names` has.
  std::vector<std::string> without_match(std::span<const std::string> names) const;
  bool is_set() const { return !setting_.empty(); }
  const std::string& setting() const { return setting_; }  ///< "NCCL_IB_HCA=mlx5", for messages

 private:
  struct Item {
    std::string name;
    std::optional<int> port;
  };
  bool names(const Item& item, std::string_view name) const {
    return prefixes_ ? name.starts_with(item.name) : name == item.name;
  }

  std::string setting_;
  bool excludes_ = false;
  bool prefixes_ = false;
  std::vector<Item> items_;
};

}  // namespace deep_ep
