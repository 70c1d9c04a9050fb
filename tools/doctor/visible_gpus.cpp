#include "tools/doctor/visible_gpus.hpp"

#include <algorithm>
#include <cctype>
#include <string_view>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"

namespace deep_ep::topology {
namespace {

/// `beginning`: in lower case, which does not matter in `text`.
bool begins_with(std::string_view text, std::string_view beginning) {
  return text.size() >= beginning.size() &&
         std::equal(beginning.begin(), beginning.end(), text.begin(),
                    [](unsigned char a, unsigned char b) { return a == std::tolower(b); });
}

}  // namespace

VisibleGpus visible_gpus(const std::vector<Gpu>& gpus, const std::optional<std::string>& cuda_visible_devices) {
  VisibleGpus visible;
  const auto find_by_id = [&](int id) -> std::optional<std::size_t> {
    for (std::size_t i = 0; i < gpus.size(); ++i) {
      if (gpus[i].cuda_id == id) return i;
    }
    return std::nullopt;
  };
  if (!cuda_visible_devices) {
    for (std::size_t i = 0; i < gpus.size(); ++i) {
      if (gpus[i].cuda_id) visible.gpus.push_back(i);
    }
    return visible;
  }
  if (trim(*cuda_visible_devices).empty()) return visible;
  for (const std::string_view entry : split(*cuda_visible_devices, ',')) {
    if (entry == "-1") return visible;
    std::optional<std::size_t> gpu;
    if (begins_with(entry, "gpu-")) {
      gpu = find_by_uuid(gpus, entry);
      if (!gpu) visible.stopped_at = fmt::format("'{}' is not the UUID of one GPU of this machine", entry);
    } else if (begins_with(entry, "mig-")) {
      visible.stopped_at = fmt::format("'{}' is a part of a GPU (MIG); the library needs whole GPUs", entry);
    } else {
      const auto number = parse_number<int>(entry);
      gpu = number ? find_by_id(*number) : std::nullopt;
      if (!gpu) {
        visible.stopped_at = number ? fmt::format("there is no GPU {}", entry)
                                    : fmt::format("'{}' is neither a number nor a UUID", entry);
      }
    }
    if (!gpu) return visible;
    if (std::find(visible.gpus.begin(), visible.gpus.end(), *gpu) != visible.gpus.end()) {
      visible.gpus.clear();
      visible.stopped_at = fmt::format("'{}' names a GPU that is in the list already", entry);
      return visible;
    }
    visible.gpus.push_back(*gpu);
  }
  return visible;
}

}  // namespace deep_ep::topology
