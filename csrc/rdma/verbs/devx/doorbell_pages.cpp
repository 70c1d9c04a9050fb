#include "csrc/rdma/verbs/devx/doorbell_pages.hpp"

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {

MappedDoorbell DoorbellPages::map(void* reg) {
  const auto address = reinterpret_cast<std::uintptr_t>(reg);
  if (address == 0 || address % sizeof(std::uint64_t) != 0) {
    fail<InvalidArgument>("doorbell register at {:#x}, allowed: a multiple of 8 that is not 0", address);
  }
  auto known = pages_.find(page_of(reg));
  if (known == pages_.end()) {
    auto* device = static_cast<std::byte*>(mapper_.map(page_of(reg)));
    known = pages_.emplace(page_of(reg), Page{device, 0}).first;
  }
  ++known->second.users;
  return {*this, reg, reinterpret_cast<std::uint64_t*>(known->second.device + place_in_page(reg))};
}

void DoorbellPages::unmap(void* reg) {
  const auto known = pages_.find(page_of(reg));
  if (--known->second.users != 0) return;
  mapper_.unmap(known->first);
  pages_.erase(known);
}

}  // namespace deep_ep::rdma::verbs
