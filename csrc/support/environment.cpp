#include "csrc/support/environment.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/environment.hpp"

namespace deep_ep::environment {
namespace {

/// Puts a value of another library's variable into the words of the table; empty: the value decides nothing, as if the
/// variable were not set.
std::string_view in_own_words(const Variable& variable, std::string_view name, std::string_view value) {
  if (name == "EP_BUFFER_DEBUG") return value == "0" ? "" : "debug";
  if (name.ends_with("_DEBUG")) {  // NVSHMEM's may be a list, of which the most talkative counts
    const auto has = [&](std::string_view word) { return value.find(word) != std::string_view::npos; };
    if (has("TRACE") || has("trace")) return "trace";
    if (has("INFO") || has("info")) return "info";
    if (has("WARN") || has("warn")) return "warn";
    return value == "VERSION" || value == "version" || value == "NONE" ? "" : value;
  }
  // Each disables or enables, and can only switch it off: one that leaves it on says nothing against the others.
  if (variable.choices.ends_with("|off")) {
    const bool is_no = value == "0" || value == "false" || value == "no" || value == "off";
    return name.ends_with("_ENABLE") == is_no ? "off" : "";
  }
  if (value == "-1" || value == "AF_UNSPEC") return {};  // words of NVSHMEM and NCCL for "choose by yourself"
  return value == "cpu_host_memory" ? "cpu" : value;
}

constexpr std::array kVariables = {
    Variable{.names = {"DEEP_EP_TIMEOUT_S"},
             .default_value = "100",
             .allowed = "seconds, 0 = wait for ever",
             .help =
                 "how long a rank waits for another one before TimeoutError, unless the program sets it; with masking "
                 "equal on all ranks",
             .is_number = true},
    Variable{.names = {"DEEP_EP_NVLINK", "NVSHMEM_DISABLE_P2P", "NCCL_P2P_DISABLE"},
             .default_value = "on",
             .choices = "on|off",
             .help = "off (NVSHMEM_DISABLE_P2P=1 or NCCL_P2P_DISABLE=1): low-latency calls reach all other ranks by "
                     "RDMA, as if the program had switched allow_nvlink off; normal mode within a node needs NVLink"},
    Variable{.names = {"DEEP_EP_MNNVL", "NVSHMEM_DISABLE_MNNVL", "NCCL_MNNVL_ENABLE"},
             .default_value = "auto",
             .choices = "auto|off",
             .help = "off (NVSHMEM_DISABLE_MNNVL=1 or NCCL_MNNVL_ENABLE=0): heaps are not shared by fabric handles, so "
                     "ranks of different machines reach each other by RDMA even where NVLink joins the machines"},
    Variable{
        .names = {"DEEP_EP_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "NCCL_SOCKET_IFNAME",
                  "GLOO_SOCKET_IFNAME"},
        .allowed = "[^][=]<interface>,...; ^ = all but these; empty = the first that other hosts reach",
        .help =
            "network interfaces of which the first takes control connections from other hosts; those without a carrier "
            "and Docker's bridges come after all others, loopback last. Names are beginnings of names unless = stands "
            "in front (in GLOO_SOCKET_IFNAME they are whole). The route decides by which interface ranks call rank 0"},
    Variable{
        .names = {"DEEP_EP_SOCKET_FAMILY", "NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY", "NCCL_SOCKET_FAMILY"},
        .default_value = "",
        .choices = "AF_INET|AF_INET6",
        .help =
            "address family of control connections, and by which ranks call rank 0, if there are addresses of both"},
    Variable{.names = {"DEEP_EP_JOB_TOKEN"},
             .allowed = "any text, the same on all ranks of a job",
             .help = "ranks that meet by TCP let none in that has another one, so jobs that by mistake use one port do "
                     "not mix; deep_ep bench --spawn gives ranks of one host a random one"},
    Variable{.names = {"DEEP_EP_CONTROL"},
             .default_value = "on",
             .choices = "on|off",
             .help = "off on any rank: processes are not connected, so a process that has ended is noticed at the "
                     "deadline of a wait alone, and a buffer with low_latency.masking is refused"},
    Variable{.names = {"DEEP_EP_CONTROL_PORTS"},
             .allowed = "<port> or <first>-<last>; empty = the system chooses",
             .help = "TCP ports of which each process takes one, where control connections go between hosts or network "
                     "namespaces; on an interface of DEEP_EP_SOCKET_IFNAME, which says how it is chosen"},
    Variable{.names = {"DEEP_EP_PROGRAMMATIC_LAUNCH"},
             .default_value = "on",
             .choices = "on|off",
             .help = "low-latency calls within a node: off = the next kernel of the stream never starts before the "
                     "results are stored, also if it is launched by programmatic dependent launch"},
    Variable{.names = {"DEEP_EP_HOST_SEED"},
             .default_value = "0",
             .allowed = "0 = fixed order",
             .help = "schedule of kernels on the CPU: any other number gives another, repeatable, order of threads and "
                     "copies",
             .most = UINT64_MAX},
    Variable{.names = {"DEEP_EP_HOST_THREADS"},
             .default_value = "0",
             .allowed = "0 = one for each hardware thread, at least 2",
             .help = "worker threads that run kernels on the CPU",
             .most = UINT64_MAX},
    Variable{
        .names = {"DEEP_EP_RANKS_PER_NODE"},
        .default_value = "0",
        .allowed = "0 = by host; otherwise a divisor of the number of ranks",
        .help =
            "how many consecutive ranks make a node, unless the program sets it; so one host can play several nodes",
        .most = UINT64_MAX},
    Variable{.names = {"DEEP_EP_LOW_LATENCY_RAILS"},
             .default_value = "auto",
             .choices = "auto|always|never",
             .help = "low-latency calls between nodes: whether a row crosses once for each node and goes on by NVLink, "
                     "unless the program sets it"},
    Variable{.names = {"DEEP_EP_LOW_LATENCY_SUMS"},
             .default_value = "fp32",
             .choices = "fp32|fp24|bf16",
             .help =
                 "low-latency combine: how a rank's sum of several rows of a token travels, unless the program sets "
                 "it; equal on all ranks"},
    Variable{.names = {"DEEP_EP_LOW_LATENCY_LANES"},
             .default_value = "auto",
             .choices = "auto|1|2|4",
             .help = "low-latency calls between nodes: connections that rows take in turn to each rank, unless the "
                     "program sets it; auto = 1, more on Ethernet where ranks are few"},
    Variable{.names = {"DEEP_EP_INTERNODE_LANES"},
             .default_value = "auto",
             .choices = "auto|1|2|4",
             .help = "normal mode between nodes: queue pairs for rows to each rail, at most num_qps_per_rank, unless "
                     "the program sets it; auto = 4 on Ethernet, else 1"},
    Variable{.names = {"DEEP_EP_RDMA_WIRE"},
             .default_value = "auto",
             .allowed = "auto|local|verbs|simulated[:key=value,...]",
             .help = "what carries RDMA: NICs (verbs), copies on one host (local), a kernel that plays the NIC on "
                     "one host (simulated; keys: rate, latency, reorder, completion, rails, slow, "
                     "slow_rate, sms); "
                     "auto = NICs where ranks have them"},
    Variable{.names = {"DEEP_EP_NIC_HANDLER", "NVSHMEM_IBGDA_NIC_HANDLER"},
             .default_value = "auto",
             .choices = "auto|gpu|doorbell|cpu",
             .help =
                 "rings the NIC: the GPU itself (gpu), or a CPU thread for it (doorbell), or a CPU thread does all the "
                 "work (cpu); auto = the first that works on all ranks"},
    Variable{.names = {"DEEP_EP_RAIL_ONLY"},
             .default_value = "auto",
             .choices = "auto|0|1",
             .help = "low-latency calls between nodes: 1 sends to ranks of other rails over the sender's rail, whose "
                     "NIC in the other node receives for them; auto = where a rail does not reach the others"},
    Variable{.names = {"DEEP_EP_RDMA_RELAXED_ORDERING"},
             .default_value = "auto",
             .choices = "auto|0|1",
             .help = "PCIe may bring the bytes that a NIC writes in any order; signals keep theirs; auto = in virtual "
                     "machines"},
    Variable{.names = {"DEEP_EP_DEVICE_TO_HCA_MAPPING"},
             .allowed = "<CUDA id or GPU UUID>:<hca>[:<port>],...; empty = automatic",
             .help =
                 "which NIC each GPU uses, or which NICs and ports, if several entries name it; CUDA ids are those of "
                 "nvidia-smi"},
    Variable{.names = {"DEEP_EP_HCA_LIST", "NVSHMEM_HCA_LIST", "NCCL_IB_HCA"},
             .allowed = "[^]<hca>[:<port>],...; ^ = all but these; empty = all",
             .help = "NICs that the automatic choice may use; in NCCL_IB_HCA names are beginnings of names unless = "
                     "stands in front"},
    Variable{.names = {"DEEP_EP_RDMA_GID_INDEX", "NVSHMEM_IB_GID_INDEX", "NCCL_IB_GID_INDEX"},
             .default_value = "auto",
             .choices = "auto",
             .allowed = "auto, or a number from 0 to 255",
             .help = "GID that every NIC uses; auto prefers RoCE v2 with an IPv4 address, separately for each NIC. "
                     "Another library's index counts on NICs that have a GID there",
             .most = 255},
    Variable{.names = {"DEEP_EP_RDMA_TRAFFIC_CLASS", "NVSHMEM_IB_TRAFFIC_CLASS", "NCCL_IB_TC"},
             .default_value = "0",
             .allowed = "0 to 255",
             .help = "traffic class of RDMA packets on Ethernet, where the DSCP is its upper six bits; on InfiniBand "
                     "only packets with a global route have one. If not set: what the administrator set for the port",
             .most = 255},
    Variable{.names = {"DEEP_EP_RDMA_SERVICE_LEVEL", "EP_OVERRIDE_RDMA_SL", "NVSHMEM_IB_SL", "NCCL_IB_SL"},
             .default_value = "0",
             .allowed = "0 to 15",
             .help = "service level of RDMA packets, on Ethernet their priority",
             .most = 15},
    Variable{.names = {"DEEP_EP_RDMA_ACK_TIMEOUT", "NCCL_IB_TIMEOUT"},
             .default_value = "18",
             .allowed = "0 to 31; 0 = wait for ever",
             .help = "an unanswered RDMA packet is sent again after 4.096 us * 2^this",
             .most = 31},
    Variable{.names = {"DEEP_EP_RDMA_RETRY_COUNT", "NCCL_IB_RETRY_CNT"},
             .default_value = "6",
             .allowed = "0 to 7; soft-RoCE takes 7 for ever",
             .help = "how often that is done before the connection to the peer fails",
             .most = 7},
    Variable{.names = {"NCCL_IB_PKEY"},
             .default_value = "0",
             .allowed = "0 to 65535",
             .help = "place of the partition key that RDMA connections use, in the table of the port",
             .most = 65535},
    Variable{.names = {"NVSHMEM_IB_DISABLE_DMABUF", "NCCL_DMABUF_ENABLE"},
             .default_value = "on",
             .choices = "on|off",
             .help = "off (NVSHMEM_IB_DISABLE_DMABUF=1 or NCCL_DMABUF_ENABLE=0): NICs reach GPU memory by peer memory "
                     "only"},
    Variable{.names = {"NVSHMEM_QP_DEPTH"},
             .default_value = "1024",
             .allowed = "a number below 2^32",
             .help = "Buffer.nvshmem_qp_depth, which programs read, and nothing else: the library knows how deep its "
                     "rings must be",
             .most = UINT32_MAX},
    Variable{.names = {"EP_AVOID_RECORD_STREAM"},
             .default_value = "0",
             .choices = "0|1",
             .help = "1 lets events of asynchronous calls of ElasticBuffer keep tensors, instead of record_stream"},
    Variable{.names = {"EP_NIC_NAME"},
             .default_value = "mlx5_0",
             .allowed = "name of a NIC",
             .help = "NIC whose speed deep_ep.utils.envs.get_rdma_gbs tells; DEEP_EP_HCA_LIST and "
                     "DEEP_EP_DEVICE_TO_HCA_MAPPING name those that are used"},
    Variable{.names = {"EP_USE_NVIDIA_TOOLS"},
             .default_value = "0",
             .choices = "0|1",
             .help = "1 makes deep_ep.utils.testing.bench_kineto leave profiling to other tools, and return ones"},
    Variable{.names = {"EP_DISABLE_BARRIER_PROFILING"},
             .default_value = "0",
             .choices = "0|1",
             .help = "with 1, no rank waits for the others before a call in deep_ep.utils.testing.bench_kineto"},
    Variable{.names = {"DEEP_EP_NVTX"},
             .default_value = "0",
             .choices = "0|1",
             .help = "1 puts an NVTX range named deep_ep.<call> around what the host does in each call of the Python "
                     "package, for buffers made afterwards"},
    Variable{.names = {"DEEP_EP_LOG", "NVSHMEM_DEBUG", "NCCL_DEBUG", "EP_BUFFER_DEBUG"},
             .default_value = "warn",
             .choices = "trace|debug|info|warn|error|off",
             .help = "how much the library logs"},
    Variable{.names = {"DEEP_EP_LOG_FILE"},
             .allowed = "%h = host name, %p = process id",
             .help = "file that log lines are appended to; standard error if not set"},
};

const Variable& row(std::string_view name) {
  const auto* found = std::ranges::find(kVariables, name, &Variable::name);
  if (found == kVariables.end()) {
    throw std::logic_error(fmt::format("{} is not in the table of environment variables", name));
  }
  return *found;
}

/// InvalidArgument says why the value is none of the variable; a text always is one.
void check(const Variable& variable, const Value& value) {
  if (std::ranges::count(split(variable.choices, '|'), value.text) != 0) return;
  if (variable.is_number) {
    if (!value.number()) fail<InvalidArgument>("not a number of zero or more ({})", variable.allowed);
  } else if (variable.most != 0) {
    if (const auto number = value.integer(); number && *number <= variable.most) return;
    if (variable.most == UINT64_MAX)
      fail<InvalidArgument>("not a whole number from 0 to 2^64-1 ({})", variable.allowed);
    fail<InvalidArgument>("not {}a number from 0 to {}", variable.choices.empty() ? "" : "auto, nor ", variable.most);
  } else if (!variable.choices.empty()) {
    fail<InvalidArgument>("not one of {}", variable.choices);
  }
}

}  // namespace

std::span<const std::string_view> Variable::others() const {
  const auto* end = std::find(names.begin(), names.end(), std::string_view());
  return {names.begin() + 1, end};
}

std::span<const Variable> variables() { return kVariables; }

std::optional<std::string> of_process(std::string_view name) {
  const char* value = std::getenv(std::string(name).c_str());
  return value != nullptr && *value != '\0' ? std::optional<std::string>(value) : std::nullopt;
}

Value Reader::value(std::string_view variable, const std::function<void(const Value&)>& judge) {
  const Variable& asked = row(variable);
  for (const std::string_view name : asked.names) {
    const auto said = source(name);
    if (!said) continue;
    Value value{is_own(name) ? *said : std::string(in_own_words(asked, name, *said)), name};
    if (value.text.empty()) continue;
    try {
      judge(value);
      if (!is_own(name)) taken.push_back(fmt::format("{}={}", name, *said));
      return value;
    } catch (const InvalidArgument& error) {
      if (is_own(name)) fail<InvalidArgument>("environment variable {}='{}': {}", name, value.text, error.what());
      ignored.push_back(fmt::format("{}='{}' is ignored: {}", name, value.text, error.what()));
    }
  }
  return {std::string(asked.default_value), {}};
}

Value Reader::value(std::string_view name) {
  return value(name, [&](const Value& set) { check(row(name), set); });
}

std::optional<double> Value::number() const {
  const auto result = parse_number<double>(text);
  return result && std::isfinite(*result) && *result >= 0 ? result : std::nullopt;
}

std::optional<std::uint64_t> Value::integer() const {
  const bool hexadecimal = text.starts_with("0x") || text.starts_with("0X");
  return parse_number<std::uint64_t>(std::string_view(text).substr(hexadecimal ? 2 : 0), hexadecimal ? 16 : 10);
}

}  // namespace deep_ep::environment

namespace deep_ep {

std::string environment_text(std::string_view name) { return environment::text(name); }

}  // namespace deep_ep
