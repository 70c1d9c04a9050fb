// The notations of DEEP_EP_DEVICE_TO_HCA_MAPPING and of lists of NICs: what is accepted, and the text of every refusal.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "csrc/rdma/discovery/settings.hpp"
#include "deep_ep/error.hpp"
#include "tests/rdma/messages.hpp"

namespace deep_ep::rdma {
namespace {

using deep_ep::test::message_of;

std::string show(const std::vector<ListedDevice>& entries) {
  std::string text;
  for (const ListedDevice& entry : entries) {
    text += fmt::format("{}{}>{}:{}", text.empty() ? "" : " ", entry.gpu, entry.name, entry.port.value_or(1));
  }
  return text;
}

TEST(DeviceMapping, IsRead) {
  const struct {
    const char* text;
    const char* entries;
  } cases[] = {{"0:mlx5_0:1,1:mlx5_1:2", "0>mlx5_0:1 1>mlx5_1:2"},
               {" 0 : mlx5_0 : 1 ,\n 1:\tmlx5_1 ", "0>mlx5_0:1 1>mlx5_1:1"},
               {"0:bnxt_re-bond.0:254", "0>bnxt_re-bond.0:254"},
               {"GPU-A0-1:mlx5_1, 1:mlx5_1", "GPU-A0-1>mlx5_1:1 1>mlx5_1:1"}};
  for (const auto& [text, entries] : cases) EXPECT_EQ(show(parse_devices(text, ListOf::gpus)), entries) << text;
}

struct Refused {
  const char* text;
  const char* message;
};

TEST(DeviceMapping, ARefusalSaysWhichEntryAndWhy) {
  const Refused cases[] = {
      {"mlx5_0", "entry 1, 'mlx5_0': it has 1 parts with ':' between them, allowed: 2 to 3"},
      {"0:mlx5_0, ,1:mlx5_1", "entry 2, '': it is empty"},
      {":mlx5_0", "entry 1, ':mlx5_0': '' is neither a CUDA id nor a GPU UUID (GPU-...)"},
      {"0:", "entry 1, '0:': '' is not the name of a device"},
      {"gpu0:mlx5_0", "entry 1, 'gpu0:mlx5_0': 'gpu0' is neither a CUDA id nor a GPU UUID (GPU-...)"},
      {"0:mlx5 0", "entry 1, '0:mlx5 0': 'mlx5 0' is not the name of a device"},
      {"0:mlx5_0:255", "entry 1, '0:mlx5_0:255': the port is '255', not a number from 1 to 254"},
      {"0:mlx5_0:1:8", "entry 1, '0:mlx5_0:1:8': it has 4 parts with ':' between them, allowed: 2 to 3"}};
  for (const auto& [text, message] : cases) {
    EXPECT_EQ(message_of<InvalidArgument>([text = text] { parse_devices(text, ListOf::gpus); }),
              fmt::format("{}; allowed: <CUDA id or GPU UUID>:<hca>[:<port>],...", message));
  }
}

TEST(NicList, AllowsWhatItNames) {
  const struct {
    const char* list;
    bool prefixes;
    const char* hca;
    int port;
    bool allowed;
  } cases[] = {{"", false, "mlx5_0", 1, true},
               {"mlx5_1", false, "mlx5_10", 1, false},
               {"mlx5_0:1, mlx5_1:2", false, "mlx5_1", 2, true},
               {"mlx5_0:1,mlx5_1:2", false, "mlx5_1", 1, false},
               {"^mlx5_0", false, "mlx5_0", 1, false},
               {"^mlx5_0", false, "mlx5_1", 1, true},
               {"mlx5_1", true, "mlx5_10", 1, true},
               {"=mlx5_1", true, "mlx5_10", 1, false},
               {"^=mlx5_1", true, "mlx5_10", 1, true},
               {"^mlx5_1", true, "mlx5_10", 1, false}};
  for (const auto& [list, prefixes, hca, port, allowed] : cases) {
    EXPECT_EQ(DeviceFilter({list, "LIST"}, prefixes, ListOf::ports).allows(hca, port), allowed) << list << " " << hca;
  }
}

TEST(NicList, ARefusalSaysWhichEntryAndWhy) {
  const Refused cases[] = {
      {"^", "entry 1, '': it is empty"},
      {"mlx5_0,^mlx5_1", "entry 2, '^mlx5_1': '^mlx5_1' is not the name of a device"},
      {"mlx5_0:1:2", "entry 1, 'mlx5_0:1:2': it has 3 parts with ':' between them, allowed: 1 to 2"},
      {":1", "entry 1, ':1': '' is not the name of a device"}};
  for (const auto& [text, message] : cases) {
    EXPECT_EQ(message_of<InvalidArgument>([text = text] {
                DeviceFilter({text, "DEEP_EP_HCA_LIST"}, false, ListOf::ports);
              }),
              fmt::format("{}; allowed: [^][=]<name>[:<port>],...", message));
  }
}

}  // namespace
}  // namespace deep_ep::rdma
