#include "csrc/rdma/verbs/devx/doorbell_pages.hpp"

namespace deep_ep::rdma::verbs {

std::uint64_t* DoorbellPages::map(void* reg) {
  const std::size_t place = reinterpret_cast<std::uintptr_t>(reg) % mapper_.page_bytes;
  std::byte* const page = static_cast<std::byte*>(reg) - place;
  std::shared_ptr<void>& mapped = pages_[page];
  if (mapped == nullptr) mapped = mapper_.map(page);
  return reinterpret_cast<std::uint64_t*>(static_cast<std::byte*>(mapped.get()) + place);
}

}  // namespace deep_ep::rdma::verbs
