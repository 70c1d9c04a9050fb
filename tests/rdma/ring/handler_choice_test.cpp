// Which handler is taken, doorbell pages, and the handler that has nothing to do.
#include "csrc/rdma/ring/handler_choice.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <set>
#include <stdexcept>

#include "csrc/rdma/ring/gpu_nic_handler.hpp"
#include "csrc/rdma/verbs/devx/doorbell_pages.hpp"
#include "deep_ep/error.hpp"
#include "tests/rdma/contains.hpp"

namespace deep_ep::rdma {
namespace {

using test::contains;

std::string possible() { return ""; }
std::string impossible() { return "the page may not be mapped"; }

TEST(HandlerChoice, AutoTakesTheGpuWhereItCan) { EXPECT_EQ(choose_nic_handler("auto", possible), NicHandlerKind::gpu); }

TEST(HandlerChoice, AutoFallsBackAndSaysWhy) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(choose_nic_handler("auto", impossible), NicHandlerKind::cpu);
  const std::string said = testing::internal::GetCapturedStderr();
  // The log may go to a file that DEEP_EP_LOG_FILE names, or be off.
  if (std::getenv("DEEP_EP_LOG") == nullptr && std::getenv("DEEP_EP_LOG_FILE") == nullptr) {
    EXPECT_TRUE(contains(said, "a CPU thread executes what kernels post"));
    EXPECT_TRUE(contains(said, "because: the page may not be mapped"));
  }
}

TEST(HandlerChoice, CpuIsNotProbed) {
  EXPECT_EQ(choose_nic_handler("cpu", []() -> std::string { throw std::logic_error("probed"); }), NicHandlerKind::cpu);
}

TEST(HandlerChoice, GpuIsTakenOrRefused) {
  EXPECT_EQ(choose_nic_handler("gpu", possible), NicHandlerKind::gpu);
  try {
    choose_nic_handler("gpu", impossible);
    FAIL() << "must throw";
  } catch (const SystemError& e) {
    EXPECT_STREQ(e.what(), "DEEP_EP_NIC_HANDLER=gpu is impossible here: the page may not be mapped");
  }
}

TEST(HandlerChoice, OtherWordsAreRefused) { EXPECT_THROW(choose_nic_handler("fpga", possible), InvalidArgument); }

/// Maps by adding to the address; refuses a page that is registered already, as CUDA does.
class FakeRegistrar final : public PageRegistrar {
 public:
  static constexpr std::size_t kShift = 4 * kDoorbellPageBytes;
  explicit FakeRegistrar(std::set<void*>& registered, bool refuses) : registered_(registered), refuses_(refuses) {}
  void* register_page(void* page) override {
    if (refuses_) throw SystemError("not permitted");
    EXPECT_TRUE(registered_.insert(page).second);
    return static_cast<std::byte*>(page) + kShift;
  }
  void unregister_page(void* page) noexcept override { EXPECT_EQ(registered_.erase(page), 1u); }

 private:
  std::set<void*>& registered_;
  bool refuses_;
};

/// Pages of registers, and behind them where they are mapped.
alignas(kDoorbellPageBytes) std::byte address_space[8 * kDoorbellPageBytes];
void* at(std::size_t address) { return address_space + address; }

TEST(DoorbellPagesTest, APageIsRegisteredOnceForAllItsRegisters) {
  std::set<void*> registered;
  {
    DoorbellPages pages(std::make_unique<FakeRegistrar>(registered, false));
    EXPECT_EQ(pages.map(at(0x0800)), at(0x0800 + FakeRegistrar::kShift));
    EXPECT_EQ(pages.map(at(0x0900)), at(0x0900 + FakeRegistrar::kShift));
    EXPECT_EQ(pages.map(at(0x0900)), at(0x0900 + FakeRegistrar::kShift));
    EXPECT_EQ(pages.map(at(0x1800)), at(0x1800 + FakeRegistrar::kShift));
    EXPECT_EQ(registered, (std::set<void*>{at(0x0000), at(0x1000)}));
    pages.unmap(at(0x0900));
    pages.unmap(at(0x0800));
    EXPECT_EQ(registered.size(), 2u);
    pages.unmap(at(0x0900));
    EXPECT_EQ(registered, (std::set<void*>{at(0x1000)}));
    EXPECT_EQ(why_kernels_cannot_ring(pages, at(0x2800)), "");
    EXPECT_EQ(registered.size(), 1u);
    EXPECT_THROW(pages.map(at(0x0804)), InvalidArgument);
    EXPECT_THROW(pages.map(nullptr), InvalidArgument);
  }
  EXPECT_TRUE(registered.empty());
}

TEST(DoorbellPagesTest, TheReasonOfARefusalIsTold) {
  std::set<void*> registered;
  DoorbellPages pages(std::make_unique<FakeRegistrar>(registered, true));
  EXPECT_EQ(why_kernels_cannot_ring(pages, at(0x0800)), "not permitted");
}

TEST(GpuNicHandlerTest, ReadsFailuresFromMemoryOfTheHost) {
  GpuNicHandler handler;
  device::rdma::CompletionEntry completion;
  std::memset(static_cast<void*>(&completion), 0xff, sizeof completion);
  handler.add({.number = 0x51, .depth = 64, .completion = &completion, .peer = 12, .device = "mlx5_3:1"});
  handler.add({.number = 0x52, .depth = 64, .peer = 13});
  EXPECT_THROW(handler.add({.number = 0x52}), InvalidArgument);
  EXPECT_NO_THROW(handler.check());
  completion.tail = device::rdma::tail_word(3, device::rdma::kCompletionOk);
  EXPECT_NO_THROW(handler.check());
  completion.opcode_number = device::rdma::swap32(device::rdma::kOpcodeFetchAdd << 24 | 0x51);
  completion.syndrome = 0x13;
  completion.vendor_syndrome = 0x88;
  completion.tail = device::rdma::tail_word(4, device::rdma::kCompletionError);
  try {
    handler.check();
    FAIL() << "must throw";
  } catch (const SystemError& e) {
    EXPECT_TRUE(contains(e.what(),
                         "RDMA fetch-and-add to rank 12 over mlx5_3:1 failed (queue pair 0x51, entry 4): "
                         "syndrome 0x13, remote access error"));
  }
  handler.remove(0x51);
  EXPECT_NO_THROW(handler.check());
}

}  // namespace
}  // namespace deep_ep::rdma
