#include "csrc/rdma/verbs/devx/doorbell_pages.hpp"

namespace deep_ep::rdma::verbs {

std::uint64_t* DoorbellPages::map(void* reg) {
  const std::size_t place = reinterpret_cast<std::uintptr_t>(reg) % mapper_.page_bytes;
  std::byte* const page = static_cast<std::byte*>(reg) - place;
  const auto known = pages_.find(page);
  std::byte* const mapped = known != pages_.end() ? known->second : static_cast<std::byte*>(mapper_.map(page));
  pages_[page] = mapped;
  return reinterpret_cast<std::uint64_t*>(mapped + place);
}

void DoorbellPages::unmap() {
  for (const auto& [page, mapped] : pages_) mapper_.unmap(page);
  pages_.clear();
}

}  // namespace deep_ep::rdma::verbs
