// Lists in which operators name devices of a machine: NICs, network interfaces, the NICs of GPUs.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/support/environment.hpp"

namespace deep_ep {

/// What an entry of such a list may have besides a name. Without ports a colon belongs to the name, as in the labels of
/// interfaces.
enum class ListOf : std::uint8_t { names, ports, gpus };

/// `<name>`, `<name>[:<port>]` or `<CUDA id or GPU UUID>:<name>[:<port>]`.
struct ListedDevice {
  std::string text;      ///< as written, without white space around it
  std::string gpu = {};  ///< a number, as nvidia-smi counts, or "GPU-...", an unambiguous beginning of a UUID
  std::string name = {};
  std::optional<int> port = {};
};

/// White space around each part is ignored. InvalidArgument says which entry is wrong, why, and what is allowed.
std::vector<ListedDevice> parse_devices(std::string_view text, ListOf what);

/// Which NICs, or network interfaces, may be used.
class DeviceFilter {
 public:
  DeviceFilter() = default;  ///< all of them
  /// A list; or, beginning with ^, of those that must not be used. `prefixes`: names are beginnings of names unless the
  /// list has = in front, behind the ^ if there is one (NCCL's notation).
  DeviceFilter(const environment::Value& value, bool prefixes, ListOf what);

  bool allows(std::string_view name, int port = 1) const;
  /// Names of the list that none of `names` has.
  std::vector<std::string> without_match(std::span<const std::string> names) const;
  bool is_set() const { return !setting_.empty(); }
  const std::string& setting() const { return setting_; }  ///< "NCCL_IB_HCA=mlx5", for messages

 private:
  bool names(const ListedDevice& device, std::string_view name) const {
    return prefixes_ ? name.starts_with(device.name) : name == device.name;
  }

  std::string setting_;
  bool excludes_ = false;
  bool prefixes_ = false;
  std::vector<ListedDevice> devices_;
};

}  // namespace deep_ep
