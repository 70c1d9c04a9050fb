// Registers on pages that may be mapped once only.
#include "csrc/rdma/verbs/devx/doorbell_pages.hpp"

#include <optional>

#include "csrc/rdma/verbs/gpu_access.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/rdma/verbs/devx/fake_pages.hpp"

namespace deep_ep::rdma::verbs {
namespace {

using deep_ep::test::message_of;

constexpr std::size_t kLargePage = 65536;  // of some machines
constexpr std::size_t kShift = kLargePage;

/// Pages of registers, followed by where they are mapped.
alignas(kLargePage) std::byte address_space[2 * kLargePage];
void* at(std::size_t address) { return address_space + address; }

// Devices put their registers on pages of 4 KiB, sixteen of which then lie on one page of the machine.
TEST(DoorbellPagesTest, OnAMachineWithLargePagesTheseAreMappedOnce) {
  test::FakePages fake(kShift, kLargePage);
  DoorbellPages pages(fake.mapper());
  const MappedDoorbell first(pages.map(at(0x0800)));
  const MappedDoorbell second(pages.map(at(0x1800)));
  const MappedDoorbell last(pages.map(at(0xf900)));
  EXPECT_EQ(fake.mapped, (std::set<void*>{at(0x0000)}));
  EXPECT_EQ(static_cast<void*>(second.get()), at(0x1800 + kShift));
  EXPECT_EQ(static_cast<void*>(last.get()), at(0xf900 + kShift));
}

TEST(DoorbellPagesTest, ABuildWithoutAGpuSaysSo) {
  if (DEEP_EP_HAVE_CUDA) GTEST_SKIP() << "this build has CUDA";
  DoorbellPages pages(gpu_page_mapper(3));
  EXPECT_EQ(message_of<SystemError>([&] { pages.map(at(0x0800)); }),
            "GPU 3 cannot map a NIC's doorbell page: this build of the library has no CUDA");
}

}  // namespace
}  // namespace deep_ep::rdma::verbs
