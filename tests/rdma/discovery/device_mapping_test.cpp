// The notations of DEEP_EP_DEVICE_TO_HCA_MAPPING and of lists of NICs: what is accepted, and the text of every refusal.
#include "csrc/rdma/discovery/device_mapping.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "deep_ep/error.hpp"

namespace deep_ep::rdma {
namespace {

std::string show(const std::vector<MappingEntry>& entries) {
  std::string text;
  for (const MappingEntry& entry : entries) {
    text += fmt::format("{}{}>{}:{}", text.empty() ? "" : " ",
                        entry.cuda_id ? std::to_string(*entry.cuda_id) : entry.uuid, entry.hca, entry.port);
  }
  return text;
}

struct Accepted {
  const char* text;
  const char* entries;
};

class AcceptedMapping : public testing::TestWithParam<Accepted> {};

TEST_P(AcceptedMapping, IsRead) { EXPECT_EQ(show(parse_device_mapping(GetParam().text)), GetParam().entries); }

INSTANTIATE_TEST_SUITE_P(Mapping, AcceptedMapping,
                         testing::Values(Accepted{"", ""}, Accepted{" \t\n", ""}, Accepted{"0:mlx5_0", "0>mlx5_0:1"},
                                         Accepted{"0:mlx5_0:1,1:mlx5_1:2", "0>mlx5_0:1 1>mlx5_1:2"},
                                         Accepted{" 0 : mlx5_0 : 1 ,\n 1:\tmlx5_1 ", "0>mlx5_0:1 1>mlx5_1:1"},
                                         Accepted{"0:bnxt_re-bond.0:254", "0>bnxt_re-bond.0:254"},
                                         Accepted{"GPU-a0000001-1111-2222-3333-444444444444:mlx5_1:1",
                                                  "GPU-a0000001-1111-2222-3333-444444444444>mlx5_1:1"},
                                         Accepted{"GPU-A0:mlx5_1, 1:mlx5_1", "GPU-A0>mlx5_1:1 1>mlx5_1:1"},
                                         Accepted{"3:mlx5_0,1:mlx5_0", "3>mlx5_0:1 1>mlx5_0:1"}));

struct Refused {
  const char* text;
  const char* message;
};

class RefusedMapping : public testing::TestWithParam<Refused> {};

TEST_P(RefusedMapping, SaysWhichEntryAndWhy) {
  try {
    parse_device_mapping(GetParam().text);
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(std::string(error.what()),
              fmt::format("{}; allowed: <CUDA id or GPU UUID>:<hca>[:<port>],...", GetParam().message));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Mapping, RefusedMapping,
    testing::Values(
        Refused{"mlx5_0", "entry 1, 'mlx5_0': there is no ':' between GPU and HCA"},
        Refused{"0:mlx5_0,", "entry 2, '': it is empty"}, Refused{"0:mlx5_0, ,1:mlx5_1", "entry 2, '': it is empty"},
        Refused{":mlx5_0", "entry 1, ':mlx5_0': the GPU is missing"},
        Refused{"0:", "entry 1, '0:': the HCA is missing"},
        Refused{"gpu0:mlx5_0", "entry 1, 'gpu0:mlx5_0': 'gpu0' is neither a CUDA id nor a GPU UUID (GPU-...)"},
        Refused{"GPU-xyz:mlx5_0", "entry 1, 'GPU-xyz:mlx5_0': 'GPU-xyz' is not a GPU UUID"},
        Refused{"MIG-a0:mlx5_0", "entry 1, 'MIG-a0:mlx5_0': 'MIG-a0' is a part of a GPU (MIG); name the GPU"},
        Refused{"0:mlx5 0", "entry 1, '0:mlx5 0': 'mlx5 0' is not the name of an HCA"},
        Refused{"0:mlx5_0:0", "entry 1, '0:mlx5_0:0': the port is '0', not a number from 1 to 254"},
        Refused{"0:mlx5_0:255", "entry 1, '0:mlx5_0:255': the port is '255', not a number from 1 to 254"},
        Refused{"0:mlx5_0:1:8", "entry 1, '0:mlx5_0:1:8': it has 4 parts, at most 3 are allowed"},
        Refused{"0:mlx5_0;1:mlx5_1", "entry 1, '0:mlx5_0;1:mlx5_1': the port is 'mlx5_1', not a number from 1 to 254"},
        Refused{"0:mlx5_0,0:mlx5_0:1", "entry 2, '0:mlx5_0:1': it comes twice"}));

struct Listed {
  const char* text;
  bool prefixes;
  const char* hca;
  int port;
  bool allowed;
};

class Filter : public testing::TestWithParam<Listed> {};

TEST_P(Filter, Allows) {
  const Listed& listed = GetParam();
  EXPECT_EQ(NicFilter::parse(listed.text, "LIST", listed.prefixes).allows(listed.hca, listed.port), listed.allowed);
}

INSTANTIATE_TEST_SUITE_P(
    Lists, Filter,
    testing::Values(Listed{"", false, "mlx5_0", 1, true}, Listed{"mlx5_0", false, "mlx5_0", 2, true},
                    Listed{"mlx5_1", false, "mlx5_10", 1, false},
                    Listed{"mlx5_0:1, mlx5_1:2", false, "mlx5_1", 2, true},
                    Listed{"mlx5_0:1,mlx5_1:2", false, "mlx5_1", 1, false},
                    Listed{"^mlx5_0", false, "mlx5_0", 1, false}, Listed{"^mlx5_0", false, "mlx5_1", 1, true},
                    Listed{"mlx5", true, "mlx5_7", 1, true}, Listed{"mlx5_1", true, "mlx5_10", 1, true},
                    Listed{"=mlx5_1", true, "mlx5_10", 1, false}, Listed{"^=mlx5_1", true, "mlx5_10", 1, true},
                    Listed{"^mlx5_1", true, "mlx5_10", 1, false},
                    Listed{"^=mlx5_1,mlx5_2:1", true, "mlx5_2", 1, false}));

class RefusedList : public testing::TestWithParam<Refused> {};

TEST_P(RefusedList, SaysWhichEntryAndWhy) {
  try {
    NicFilter::parse(GetParam().text, "DEEP_EP_HCA_LIST", false);
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(std::string(error.what()), fmt::format("{}; allowed: [^]<hca>[:<port>],...", GetParam().message));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Lists, RefusedList,
    testing::Values(Refused{"^", "entry 1, '': it is empty"}, Refused{"mlx5_0,", "entry 2, '': it is empty"},
                    Refused{"=mlx5_0", "entry 1, '=mlx5_0': '=' is NCCL's notation; here names are always complete"},
                    Refused{"mlx5_0,^mlx5_1", "entry 2, '^mlx5_1': '^' may appear once, at the beginning of the list"},
                    Refused{"mlx5_0:1:2", "entry 1, 'mlx5_0:1:2': it has 3 parts, at most 2 are allowed"},
                    Refused{":1", "entry 1, ':1': the HCA is missing"}));

}  // namespace
}  // namespace deep_ep::rdma
