// The two notations in which operators name NICs: a GPU→NIC mapping, and a list of NICs to use or to avoid.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace deep_ep::rdma {

/// One entry of DEEP_EP_DEVICE_TO_HCA_MAPPING.
struct MappingEntry {
  std::string text;            ///< as written, without white space around it
  std::optional<int> cuda_id;  ///< as nvidia-smi counts; otherwise:
  std::string uuid;            ///< "GPU-..." or an unambiguous beginning of one
  std::string hca;
  int port = 1;
};

/// `<CUDA id or GPU UUID>:<hca>[:<port>],...`; white space around every part is ignored, the default port is 1. A GPU
/// with several entries uses them all, the first one for what one alone can do.
/// InvalidArgument says which entry is wrong and why. An empty text is an empty mapping.
std::vector<MappingEntry> parse_device_mapping(std::string_view text);

/// Which NICs may be used.
class NicFilter {
 public:
  struct Item {
    std::string hca;
    std::optional<int> port;
  };

  NicFilter() = default;  ///< all of them
  /// `<hca>[:<port>],...`, or, beginning with ^, those that must not be used. `source` is the variable, for messages.
  /// `prefixes`: names are prefixes unless the list starts with = (NCCL's notation; "^=" works as well).
  static NicFilter parse(std::string_view text, std::string source, bool prefixes);

  bool allows(std::string_view hca, int port) const;
  /// Names of the list that none of `hcas` has.
  std::vector<std::string> without_match(std::span<const std::string> hcas) const;
  bool is_set() const { return !source_.empty(); }
  const std::string& source() const { return source_; }
  const std::string& text() const { return text_; }

 private:
  bool names(const Item& item, std::string_view hca) const {
    return prefixes_ ? hca.starts_with(item.hca) : hca == item.hca;
  }

  std::string source_;
  std::string text_;
  bool exclude_ = false;
  bool prefixes_ = false;
  std::vector<Item> items_;
};

}  // namespace deep_ep::rdma
