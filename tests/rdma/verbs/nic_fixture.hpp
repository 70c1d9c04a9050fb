// A NIC that records what it is asked, and pages of registers that no device has.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "csrc/executor/backend.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "tests/rdma/verbs/fake_verbs.hpp"

namespace deep_ep::rdma::verbs::test {

inline constexpr std::size_t kHeapBytes = std::size_t{1} << 20;
inline constexpr std::size_t kMachinePage = 65536;  ///< the largest

/// A page of registers, followed by where it is mapped.
alignas(kMachinePage) inline std::byte registers[2 * kMachinePage];
inline constexpr std::size_t kRegister = 0x800;

class NicFixture : public testing::Test {
 protected:
  NicFixture() {
    fake_.uar.reg_addr = registers + kRegister;
    fake_.uar.base_addr = registers;
    nic_.nic.nic = {.name = "fake_0", .capability = Capability::mlx5};
    GpuAccess& gpu = nic_.gpu.emplace();
    gpu.export_dma_buf = [](void*, std::size_t) { return UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); };
    nic_.mlx5 = &fake_.mlx5;
    // Refuses a page of the machine that is mapped already, as CUDA does.
    gpu.map_page = [this](void* page) -> std::shared_ptr<void> {
      if (!refusal_of_pages_.empty()) throw SystemError(refusal_of_pages_);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(page) % nic_.gpu->page_bytes, 0u) << "no beginning of a page";
      EXPECT_TRUE(mapped_.insert(page).second);
      return {static_cast<std::byte*>(page) + kMachinePage, [this, page](void*) { mapped_.erase(page); }};
    };
  }
  ~NicFixture() override {
    ends_.reset();
    nic_.landing_nics.clear();
    EXPECT_EQ(fake_.alive, 0);
    EXPECT_EQ(fake_.broken_rules, std::vector<std::string>{});
    EXPECT_TRUE(mapped_.empty());
  }

  /// Each end is connected to itself: what the peer says is the same.
  void make(const ConnectionOptions& options) {
    NicAccess nic = nic_;
    nic.device = nic.open("fake_0", {.gid_index = 3}, fake_.functions, *heap_);
    ends_ = make_nic_ends(handler_, nic, executor_, options);
    table_.clear();
    for (std::size_t end = 0; end < options.ends(); ++end) table_.push_back(ends_->connect(end, ends_->address(end)));
  }
  /// Commands with this opcode.
  std::vector<FakeVerbs::Command> commands(std::uint16_t opcode) const {
    std::vector<FakeVerbs::Command> found;
    for (const auto& command : fake_.commands) {
      if (command.opcode() == opcode) found.push_back(command);
    }
    return found;
  }

  FakeVerbs fake_;
  std::shared_ptr<Executor> executor_ = make_host_executor();
  std::unique_ptr<SymmetricHeap> heap_ =
      backend_of(executor_)->create_heap(*make_thread_bootstraps(1).front(), [](auto) { return kHeapBytes; });
  NicAccess nic_;
  NicHandler handler_ = NicHandler::gpu;
  std::string refusal_of_pages_;  ///< why no page may be mapped; empty: all may
  std::set<void*> mapped_;        ///< pages
  std::vector<RdmaQueuePair> table_;
  std::unique_ptr<Ends> ends_;
};

}  // namespace deep_ep::rdma::verbs::test
