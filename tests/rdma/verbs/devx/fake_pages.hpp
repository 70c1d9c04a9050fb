// Pages of registers that no device has, mapped into no GPU.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <set>
#include <string>

#include "csrc/rdma/verbs/devx/doorbell_pages.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs::test {

/// Maps a page to the one `shift` bytes behind it; refuses a page that is mapped already, as CUDA does.
class FakePages {
 public:
  explicit FakePages(std::size_t shift) : shift_(shift) {}

  std::string refusal;     ///< why no page may be mapped; empty: all may
  std::set<void*> mapped;  ///< pages

  PageMapper mapper() {
    return {[this](void* page) -> void* {
              if (!refusal.empty()) throw SystemError(refusal);
              EXPECT_TRUE(mapped.insert(page).second);
              return static_cast<std::byte*>(page) + shift_;
            },
            [this](void* page) { EXPECT_EQ(mapped.erase(page), 1u); }};
  }

 private:
  std::size_t shift_;
};

}  // namespace deep_ep::rdma::verbs::test
