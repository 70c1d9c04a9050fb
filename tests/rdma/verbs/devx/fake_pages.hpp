// Pages of registers that no device has, mapped into no GPU.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include "csrc/rdma/verbs/devx/doorbell_pages.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs::test {

inline constexpr std::size_t kMachinePage = 4096;  ///< of most machines, in bytes

/// Maps a page to the one `shift` bytes behind it; refuses a page of the machine that is mapped already, as CUDA does.
class FakePages {
 public:
  explicit FakePages(std::size_t shift, std::size_t page_bytes = kMachinePage)
      : shift_(shift), page_bytes_(page_bytes) {}

  std::string refusal;     ///< why no page may be mapped; empty: all may
  std::set<void*> mapped;  ///< pages

  PageMapper mapper() {
    return {[this](void* page) -> void* {
              if (!refusal.empty()) throw SystemError(refusal);
              EXPECT_EQ(reinterpret_cast<std::uintptr_t>(page) % page_bytes_, 0u) << "no beginning of a page";
              EXPECT_TRUE(mapped.insert(page).second);
              return static_cast<std::byte*>(page) + shift_;
            },
            [this](void* page) { EXPECT_EQ(mapped.erase(page), 1u); }, page_bytes_};
  }

 private:
  std::size_t shift_;
  std::size_t page_bytes_;
};

}  // namespace deep_ep::rdma::verbs::test
