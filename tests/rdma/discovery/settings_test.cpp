// Variables of this library and of others: which ones count, which are ignored, and why.
#include "csrc/rdma/discovery/settings.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "deep_ep/error.hpp"
#include "tests/rdma/messages.hpp"
#include "tests/support/variables.hpp"

namespace deep_ep::rdma {
namespace {

using Texts = std::vector<std::string>;

RdmaSettings read(const Variables& variables) { return read_settings(source_of(variables)); }

std::string refusal(const Variables& variables) {
  return test::message_of<InvalidArgument>([&] { read(variables); });
}

TEST(RdmaSettings, NothingIsSet) {
  const RdmaSettings settings = read({});
  EXPECT_TRUE(settings.mapping.empty());
  EXPECT_TRUE(read({{"DEEP_EP_DEVICE_TO_HCA_MAPPING", " \t\n"}}).mapping.empty());
  EXPECT_FALSE(settings.nics.is_set());
  EXPECT_EQ(settings.gid_index.text, "auto");
  EXPECT_EQ(settings.nic_handler, NicHandler::automatic);
  EXPECT_EQ(settings.wire.kind, WireKind::automatic);
  EXPECT_TRUE(settings.dma_buf);
  EXPECT_EQ(settings.path, PathOptions{}) << "two places give the defaults";
  EXPECT_TRUE(settings.taken.empty());
  EXPECT_TRUE(settings.warnings.empty());
}

TEST(RdmaSettings, TheLibrarysOwnNamesWin) {
  const RdmaSettings settings = read({{"DEEP_EP_HCA_LIST", "mlx5_0"},
                                      {"NVSHMEM_HCA_LIST", "mlx5_1"},
                                      {"DEEP_EP_RDMA_GID_INDEX", "5"},
                                      {"NVSHMEM_IB_GID_INDEX", "3"},
                                      {"DEEP_EP_NIC_HANDLER", "cpu"},
                                      {"NVSHMEM_IBGDA_NIC_HANDLER", "gpu"},
                                      {"DEEP_EP_RDMA_TRAFFIC_CLASS", "106"},
                                      {"NCCL_IB_TC", "52"}});
  EXPECT_TRUE(settings.nics.allows("mlx5_0", 1));
  EXPECT_FALSE(settings.nics.allows("mlx5_1", 1));
  EXPECT_EQ(settings.gid_index.text, "5");
  EXPECT_EQ(settings.gid_index.name, "DEEP_EP_RDMA_GID_INDEX");
  EXPECT_EQ(settings.nic_handler, NicHandler::cpu);
  EXPECT_EQ(settings.path.traffic_class, 106);
  EXPECT_TRUE(settings.has_traffic_class);
  EXPECT_FALSE(read({{"NCCL_IB_TC", "x"}}).has_traffic_class);
  EXPECT_TRUE(read({{"NCCL_IB_TC", "0"}}).has_traffic_class);
  EXPECT_TRUE(settings.taken.empty());
}

TEST(RdmaSettings, Wire) {
  const auto why = [](const std::string& text) { return refusal({{"DEEP_EP_RDMA_WIRE", text}}); };
  EXPECT_EQ(why("tcp"),
            "environment variable DEEP_EP_RDMA_WIRE='tcp': not one of auto, local, verbs, simulated[:key=value,...]");
  for (const WireKind wire : {WireKind::automatic, WireKind::local, WireKind::verbs, WireKind::simulated}) {
    EXPECT_EQ(read({{"DEEP_EP_RDMA_WIRE", std::string(name_of(wire))}}).wire.kind, wire);
  }
  const SimulatedNic nothing_said = parse_wire("simulated").nic;
  EXPECT_TRUE(nothing_said.gb_per_s < 0 && nothing_said.latency_us < 0 && nothing_said.multiprocessors == 0);
  const SimulatedNic nic = parse_wire("simulated:rate=12.5, latency = 4,reorder=1.5,completion=2,sms=1").nic;
  EXPECT_EQ(nic.gb_per_s, 12.5);
  EXPECT_EQ(nic.latency_us, 4);
  EXPECT_EQ(nic.reorder_us, 1.5);
  EXPECT_EQ(nic.completion_us, 2);
  EXPECT_EQ(nic.multiprocessors, 1);
  EXPECT_EQ(why("simulated:rate=-1"),
            "environment variable DEEP_EP_RDMA_WIRE='simulated:rate=-1': simulated: 'rate=-1', allowed: rate= a number "
            "from 0 to 1000 (GB/s; 0: no limit)");
  EXPECT_TRUE(why("simulated:speed=1")
                  .ends_with("simulated has no 'speed', allowed: rate, latency, reorder, completion, "
                             "rails, slow, slow_rate, sms"));
  for (const char* const wrong : {"simulated:rate", "simulated:latency=nan", "simulated:sms=0", "simulated:sms=1.5"}) {
    EXPECT_NE(why(wrong).find("allowed: "), std::string::npos) << wrong;
  }
  EXPECT_TRUE(why("simulated:sms=3").ends_with("'sms=3', allowed: sms= a whole number from 1 to 2 (that a NIC takes)"));
  EXPECT_TRUE(why("simulated:").ends_with("sms"));
  EXPECT_TRUE(why("local:rate=5").ends_with("not one of auto, local, verbs, simulated[:key=value,...]"));
}

TEST(RdmaSettings, OfTheSeeds) {
  const RdmaSettings settings =
      read({{"NVSHMEM_IBGDA_NIC_HANDLER", "gpu"}, {"NVSHMEM_IB_GID_INDEX", "3"}, {"NCCL_IB_TC", "52"}});
  EXPECT_EQ(settings.nic_handler, NicHandler::gpu);
  EXPECT_EQ(settings.gid_index.text, "3");
  EXPECT_EQ(settings.gid_index.name, "NVSHMEM_IB_GID_INDEX");
  EXPECT_EQ(settings.path.traffic_class, 52);
  EXPECT_EQ(settings.taken, (Texts{"NVSHMEM_IB_GID_INDEX=3", "NVSHMEM_IBGDA_NIC_HANDLER=gpu", "NCCL_IB_TC=52"}));
}

TEST(RdmaSettings, ListsOfOthers) {
  EXPECT_TRUE(read({{"NCCL_IB_HCA", "mlx5"}}).nics.allows("mlx5_3", 1)) << "beginnings";
  EXPECT_FALSE(read({{"NCCL_IB_HCA", "=mlx5"}}).nics.allows("mlx5_3", 1));
  EXPECT_FALSE(read({{"NVSHMEM_HCA_LIST", "^mlx5_3:1"}}).nics.allows("mlx5_3", 1));
  const RdmaSettings settings = read({{"NVSHMEM_HCA_LIST", "mlx5_0:x"}, {"NCCL_IB_HCA", "mlx5_1"}});
  EXPECT_TRUE(settings.nics.allows("mlx5_1", 1));
  ASSERT_EQ(settings.warnings.size(), 1u);
  EXPECT_TRUE(settings.warnings[0].starts_with("NVSHMEM_HCA_LIST='mlx5_0:x' is ignored: ")) << settings.warnings[0];
}

TEST(RdmaSettings, NumbersForQueuePairs) {
  const RdmaSettings settings = read({{"NVSHMEM_IB_TRAFFIC_CLASS", "300"},
                                      {"NCCL_IB_TC", "106"},
                                      {"EP_OVERRIDE_RDMA_SL", "3"},
                                      {"NCCL_IB_SL", "1"},
                                      {"NCCL_IB_TIMEOUT", "20"},
                                      {"NCCL_IB_RETRY_CNT", "8"},
                                      {"NCCL_IB_PKEY", "1"}});
  EXPECT_EQ(settings.path.traffic_class, 106);
  EXPECT_EQ(settings.path.service_level, 3);
  EXPECT_EQ(settings.path.ack_timeout, 20);
  EXPECT_EQ(settings.path.retry_count, 6);
  EXPECT_EQ(settings.path.pkey_index, 1);
  EXPECT_EQ(settings.warnings, (Texts{"NVSHMEM_IB_TRAFFIC_CLASS='300' is ignored: not a number from 0 to 255",
                                      "NCCL_IB_RETRY_CNT='8' is ignored: not a number from 0 to 7"}));
}

TEST(RdmaSettings, HandlersAndMemoryOfOthers) {
  EXPECT_EQ(read({{"DEEP_EP_NIC_HANDLER", "doorbell"}}).nic_handler, NicHandler::doorbell);
  EXPECT_EQ(read({{"NVSHMEM_IBGDA_NIC_HANDLER", "cpu_host_memory"}}).nic_handler, NicHandler::cpu);
  EXPECT_EQ(read({{"NVSHMEM_IBGDA_NIC_HANDLER", "GPU"}}).warnings.size(), 1u);
  EXPECT_FALSE(read({{"NVSHMEM_IB_DISABLE_DMABUF", "1"}}).dma_buf);
  EXPECT_TRUE(read({{"NVSHMEM_IB_DISABLE_DMABUF", "0"}}).dma_buf);
  EXPECT_FALSE(read({{"NCCL_DMABUF_ENABLE", "0"}}).dma_buf);
  EXPECT_EQ(read({{"DEEP_EP_RDMA_GID_INDEX", "auto"}, {"NVSHMEM_IB_GID_INDEX", "3"}}).gid_index.text, "auto");
  EXPECT_TRUE(read({{"NVSHMEM_IB_GID_INDEX", "-1"}, {"NCCL_IB_SL", "-1"}}).warnings.empty()) << "as if not set";
  EXPECT_EQ(read({}).relaxed_ordering, Choice::automatic);
  EXPECT_EQ(read({{"DEEP_EP_RDMA_RELAXED_ORDERING", "1"}}).relaxed_ordering, Choice::yes);
}

TEST(RdmaSettings, OwnVariablesMustBeRight) {
  for (const char* wrong : {"-1", "256", "three", "3,3"}) {
    EXPECT_EQ(
        refusal({{"DEEP_EP_RDMA_GID_INDEX", wrong}}),
        fmt::format("environment variable DEEP_EP_RDMA_GID_INDEX='{}': not auto, nor a number from 0 to 255", wrong));
  }
  EXPECT_TRUE(refusal({{"DEEP_EP_HCA_LIST", "a,,b"}})
                  .starts_with("environment variable DEEP_EP_HCA_LIST='a,,b': entry 2, '': it is empty"));
  EXPECT_TRUE(refusal({{"DEEP_EP_DEVICE_TO_HCA_MAPPING", "0"}})
                  .starts_with("environment variable DEEP_EP_DEVICE_TO_HCA_MAPPING='0': entry 1"));
  EXPECT_TRUE(
      refusal({{"DEEP_EP_NIC_HANDLER", "nic"}}).starts_with("environment variable DEEP_EP_NIC_HANDLER='nic': "));
  EXPECT_TRUE(refusal({{"DEEP_EP_RDMA_TRAFFIC_CLASS", "256"}})
                  .starts_with("environment variable DEEP_EP_RDMA_TRAFFIC_CLASS='256': "));
}

}  // namespace
}  // namespace deep_ep::rdma
