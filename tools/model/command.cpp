// `deep_ep model`: what dispatch and combine between nodes should take, before there is a cluster.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "deep_ep/error.hpp"
#include "kernels/common/limits.hpp"
#include "tools/commands.hpp"
#include "tools/common/json_output.hpp"
#include "tools/model/throughput.hpp"

namespace deep_ep::tools {
namespace {

constexpr std::array kOperations = {Operation::dispatch_fp8, Operation::dispatch_bf16, Operation::combine};

struct ModelOptions {
  ModelCase shape;
  std::vector<int> nodes = {2, 4, 8, 16};
  std::string gpu = "h200";
  bool json = false;

  const Machine& machine() const {
    for (const Machine& one : machines()) {
      if (one.name == gpu) return one;
    }
    throw InvalidArgument(fmt::format("--gpu {}: unknown", gpu));
  }
  ModelCase with(int count) const {
    ModelCase one = shape;
    one.nodes = count;
    return one;
  }
};

void check(const ModelOptions& options) {
  for (const int nodes : options.nodes) {
    const ModelCase shape = options.with(nodes);
    const int ranks = nodes * shape.ranks_per_node;
    if (ranks > kMaxRanks) {
      throw InvalidArgument(fmt::format("--nodes {}: {} ranks, allowed: at most {}", nodes, ranks, kMaxRanks));
    }
    if (shape.experts % ranks != 0) {
      throw InvalidArgument(fmt::format("--experts {}: must be a multiple of the {} ranks", shape.experts, ranks));
    }
    const int groups = shape.groups == 0 ? nodes : std::min(shape.groups, nodes);
    if (shape.topk > groups * (shape.experts / nodes)) {
      throw InvalidArgument(fmt::format("--topk {}: more than the {} experts of {} nodes", shape.topk,
                                        groups * (shape.experts / nodes), groups));
    }
  }
}

nlohmann::json json_of(const ModelOptions& options, int nodes) {
  const ModelCase shape = options.with(nodes);
  const Spread spread = spread_of(shape);
  nlohmann::json operations = nlohmann::json::array();
  for (const Operation operation : kOperations) {
    const Prediction made = predict(shape, options.machine(), operation);
    operations.push_back({{"operation", name_of(operation)},
                          {"wire_bytes", made.wire_bytes},
                          {"nvlink_bytes", made.nvlink_bytes},
                          {"floor_us", made.floor_us},
                          {"us", made.us},
                          {"wire_gb_per_s", made.wire_gb_s},
                          {"upstream_rdma_gb_per_s", made.upstream_rdma_gb_s},
                          {"upstream_nvlink_gb_per_s", made.upstream_nvlink_gb_s},
                          {"limit", made.nvlink_is_the_limit ? "nvlink" : "nic"}});
  }
  return {{"nodes", nodes},
          {"ranks", nodes * shape.ranks_per_node},
          {"nodes_per_token", spread.nodes},
          {"remote_nodes_per_token", spread.remote_nodes},
          {"ranks_per_token", spread.ranks},
          {"operations", operations}};
}

void print_as_json(const ModelOptions& options) {
  nlohmann::json results = nlohmann::json::array();
  for (const int nodes : options.nodes) results.push_back(json_of(options, nodes));
  const ModelCase& shape = options.shape;
  print_json({{"gpu", options.gpu},
              {"nvlink_gb_per_s", options.machine().nvlink_gb_s},
              {"nic_gb_per_s", shape.nic_gb_s},
              {"latency_us", shape.latency_us},
              {"ranks_per_node", shape.ranks_per_node},
              {"tokens", shape.tokens},
              {"hidden", shape.hidden},
              {"topk", shape.topk},
              {"experts", shape.experts},
              {"groups", shape.groups},
              {"results", results}});
}

void print_as_table(const ModelOptions& options) {
  const ModelCase& shape = options.shape;
  fmt::print("{} tokens of {} channels on each rank, top-{} of {} experts{}\n", shape.tokens, shape.hidden, shape.topk,
             shape.experts, shape.groups == 0 ? "" : fmt::format(" on {} nodes for each token", shape.groups));
  fmt::print("NVLink {:.0f} GB/s ({}: {}), a NIC of {:g} GB/s for each rank, {:g} us a message\n\n",
             options.machine().nvlink_gb_s, options.gpu, options.machine().nvlink_source, shape.nic_gb_s,
             shape.latency_us);
  constexpr const char* kLine = "{:>5} {:>5} {:>13}  {:<13} {:>9} {:>9} {:>10} {:>12} {:>12}  {}\n";
  fmt::print(kLine, "nodes", "ranks", "nodes a token", "operation", "floor us", "us", "wire GB/s", "GB/s (RDMA)",
             "GB/s (NVL)", "limit");
  for (const int nodes : options.nodes) {
    const ModelCase of_nodes = options.with(nodes);
    for (const Operation operation : kOperations) {
      const Prediction made = predict(of_nodes, options.machine(), operation);
      fmt::print(kLine, nodes, nodes * of_nodes.ranks_per_node, fmt::format("{:.2f}", spread_of(of_nodes).nodes),
                 name_of(operation), fmt::format("{:.0f}", made.floor_us), fmt::format("{:.0f}", made.us),
                 fmt::format("{:.1f}", made.wire_gb_s), fmt::format("{:.1f}", made.upstream_rdma_gb_s),
                 fmt::format("{:.1f}", made.upstream_nvlink_gb_s), made.nvlink_is_the_limit ? "NVLink" : "NIC");
    }
  }
  fmt::print(
      "\nfloor: the bytes at the NIC's rate. (RDMA) and (NVL) count as upstream's tests do: rows that stay in their "
      "node, or\n"
      "on their rank, too. A prediction: no NIC has carried these calls yet. docs/model.md says what it is made of.\n");
}

}  // namespace

void add_model_command(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("model", "Predict dispatch and combine between nodes from measured rates");
  auto options = std::make_shared<ModelOptions>();
  const auto add = [&](const char* name, auto& value, const char* help) {
    return command->add_option(name, value, help)->capture_default_str();
  };
  ModelCase& shape = options->shape;
  add("--nodes", options->nodes, "Numbers of nodes")->delimiter(',')->check(CLI::Range(1, kMaxRanks));
  add("--ranks-per-node", shape.ranks_per_node, "Ranks of a node, each with a NIC")->check(CLI::Range(1, kMaxRanks));
  std::vector<std::string> names;
  for (const Machine& one : machines()) names.push_back(one.name);
  add("--gpu", options->gpu, "NVLink's rate is that of")->check(CLI::IsMember(names));
  add("--nic", shape.nic_gb_s, "Rate of a NIC in GB/s; 400 Gbit/s are 50")->check(CLI::Range(0.1, 1000.0));
  add("--latency", shape.latency_us, "Of a message between two NICs, us")->check(CLI::Range(0.0, 1000.0));
  add("--tokens", shape.tokens, "Tokens of each rank")->check(CLI::Range(1, 1 << 20));
  add("--hidden", shape.hidden, "Channels of a token")->check(CLI::Range(16, 1 << 20));
  add("--topk", shape.topk, "Experts of each token")->check(CLI::Range(1, kMaxTopk));
  add("--experts", shape.experts, "Experts of all ranks")->check(CLI::Range(1, 1 << 16));
  add("--groups", shape.groups, "Nodes on which a token's experts may be; 0: all")->check(CLI::Range(0, kMaxRanks));
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &action] {
    action = [options] {
      check(*options);
      options->json ? print_as_json(*options) : print_as_table(*options);
      return 0;
    };
  });
}

}  // namespace deep_ep::tools
