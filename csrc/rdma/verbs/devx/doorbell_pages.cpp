#include "csrc/rdma/verbs/devx/doorbell_pages.hpp"

namespace deep_ep::rdma::verbs {

MappedDoorbell DoorbellPages::map(void* reg) {
  const auto address = reinterpret_cast<std::uintptr_t>(reg);
  const std::size_t place = address % mapper_.page_bytes;
  std::byte* const page = static_cast<std::byte*>(reg) - place;
  std::shared_ptr<std::byte> mapped = pages_[page].lock();
  if (mapped == nullptr) {
    mapped = {static_cast<std::byte*>(mapper_.map(page)), [page, unmap = mapper_.unmap](std::byte*) { unmap(page); }};
    pages_[page] = mapped;
  }
  return {mapped, reinterpret_cast<std::uint64_t*>(mapped.get() + place)};
}

}  // namespace deep_ep::rdma::verbs
