#include "csrc/rdma/verbs/devx/doorbell_pages.hpp"

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {
namespace {

std::size_t place_in_page(const void* reg) { return reinterpret_cast<std::uintptr_t>(reg) % kDoorbellPageBytes; }
std::byte* page_of(void* reg) { return static_cast<std::byte*>(reg) - place_in_page(reg); }

}  // namespace

DoorbellPages::DoorbellPages(std::unique_ptr<PageRegistrar> registrar) : registrar_(std::move(registrar)) {}

DoorbellPages::~DoorbellPages() {
  for (const auto& [page, state] : pages_) registrar_->unregister_page(page);
}

std::uint64_t* DoorbellPages::map(void* reg) {
  const auto address = reinterpret_cast<std::uintptr_t>(reg);
  if (address == 0 || address % sizeof(std::uint64_t) != 0) {
    fail<InvalidArgument>("doorbell register at {:#x}, allowed: a multiple of 8 that is not 0", address);
  }
  const std::lock_guard lock(mutex_);
  auto known = pages_.find(page_of(reg));
  if (known == pages_.end()) {
    auto* device = static_cast<std::byte*>(registrar_->register_page(page_of(reg)));
    known = pages_.emplace(page_of(reg), Page{device, 0}).first;
  }
  ++known->second.users;
  return reinterpret_cast<std::uint64_t*>(known->second.device + place_in_page(reg));
}

void DoorbellPages::unmap(void* reg) noexcept {
  const std::lock_guard lock(mutex_);
  const auto known = pages_.find(page_of(reg));
  if (known == pages_.end() || --known->second.users != 0) return;
  registrar_->unregister_page(known->first);
  pages_.erase(known);
}

std::string why_kernels_cannot_ring(DoorbellPages& pages, void* reg) {
  try {
    pages.map(reg);
  } catch (const SystemError& e) {
    return e.what();
  }
  pages.unmap(reg);
  return "";
}

}  // namespace deep_ep::rdma
