// `deep_ep size`: what buffers take, before anything is allocated. All numbers come from where the library has its own.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "csrc/buffer/buffer_plan.hpp"
#include "csrc/buffer/options.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "csrc/rdma/verbs/devx/devx_device.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/common/limits.hpp"
#include "tools/commands.hpp"
#include "tools/common/json_output.hpp"

namespace deep_ep::tools {
namespace {

using nlohmann::json;

/// A run, as far as the sizes of its buffers depend on it.
struct SizeCommand {
  int ranks = 8;
  int ranks_per_node = 8;
  std::int64_t tokens = 4096;
  int low_latency_tokens = 128;
  std::int64_t hidden = 7168;
  int topk = 8;
  int experts = 256;
  std::string dtype = "bf16";
  bool json = false;

  int nodes() const { return ranks / ranks_per_node; }
};

/// The bytes of a buffer that a program may make.
json sized(const char* mode, const BufferOptions& options, int ranks, int ranks_per_node) {
  const BufferPlan plan = BufferPlan::make(
      options, NodeMembership::of_domains(0, std::vector<int>(static_cast<std::size_t>(ranks)), ranks_per_node));
  const HeapLayout& layout = plan.layout;
  std::size_t queue_pairs = 0, ring_bytes = 0;  // as the handler `gpu` has rings; others take less
  for (const rdma::ConnectionOptions& connection : plan.connections()) {
    queue_pairs += connection.ends();
    ring_bytes += connection.ends() * connection.rings({.alignment = rdma::verbs::devx::kRingAlignment}).bytes();
  }
  return {{"mode", mode},
          {"options",
           {{"heap_bytes", options.heap_bytes},
            {"max_local_experts", options.max_local_experts},
            {"low_latency_bytes", options.low_latency.bytes}}},
          {"heap_bytes", layout.bytes()},
          {"parts",
           {{"received", layout.bytes() - layout.arena_at()},
            {"window", layout.window_bytes},
            {"low_latency", layout.low_latency.bytes},
            {"staging", layout.low_latency.staging_bytes},
            {"signals", layout.low_latency_at()}}},
          // Bytes that NICs read and write: the heap, where there is a NIC to use.
          {"rdma_bytes", queue_pairs == 0 ? 0 : layout.bytes()},
          {"queue_pairs", queue_pairs},
          {"ring_bytes", ring_bytes}};
}

/// One for each mode, the last one for all modes together (but where there are no low-latency calls).
json size_buffers(const SizeCommand& size) {
  const bool wide = size.dtype == "bf16";
  BufferOptions none;
  none.max_local_experts = std::max(none.max_local_experts, size.experts / size.ranks);
  none.ranks_per_node = size.ranks_per_node;
  const auto normal_mode = [&](int ranks) {
    BufferOptions options = none;
    options.heap_bytes =
        Buffer::heap_bytes_hint(ranks, size.tokens, wide ? 2 * size.hidden : size.hidden, size.topk, wide ? 0 : -1);
    return options;
  };
  const auto with_low_latency = [&](BufferOptions options) {
    options.low_latency.bytes =
        Buffer::low_latency_bytes_hint(size.low_latency_tokens, size.hidden, size.ranks, size.experts);
    return options;
  };
  json buffers = json::array();
  const auto add = [&](const char* mode, const BufferOptions& options, int ranks) {
    buffers.push_back(sized(mode, with_environment(options, ranks), ranks, size.ranks_per_node));
  };
  add("intranode", normal_mode(size.ranks_per_node), size.ranks_per_node);
  if (size.nodes() > 1) add("internode", normal_mode(size.ranks), size.ranks);
  if (size.low_latency_tokens == 0) return buffers;
  // Its calls need nothing of the heap beside their own part.
  none.heap_bytes = 0;
  add("low_latency", with_low_latency(none), size.ranks);
  add("all", with_low_latency(normal_mode(size.ranks)), size.ranks);
  return buffers;
}

void print_table(const SizeCommand& size, const json& buffers) {
  fmt::print("On each of {} ranks, {} a node: {} tokens of {} channels ({}), top-{} of {} experts", size.ranks,
             size.ranks_per_node, size.tokens, size.hidden, size.dtype, size.topk, size.experts);
  fmt::print("; low-latency calls of {} tokens\n\n", size.low_latency_tokens);
  constexpr const char* kLine = "{:<13}{:>11}{:>11}{:>11}{:>13}{:>11}{:>11}{:>11}{:>7}{:>11}\n";
  fmt::print(kLine, "buffer", "heap", "received", "window", "low latency", "staging", "signals", "RDMA", "pairs",
             "rings");
  const auto bytes = [](const json& value) { return format_bytes(value.get<std::uint64_t>()); };
  for (const json& buffer : buffers) {
    const json& parts = buffer["parts"];
    fmt::print(kLine, buffer["mode"].get<std::string>(), bytes(buffer["heap_bytes"]), bytes(parts["received"]),
               bytes(parts["window"]), bytes(parts["low_latency"]), bytes(parts["staging"]), bytes(parts["signals"]),
               bytes(buffer["rdma_bytes"]), buffer["queue_pairs"].get<int>(), bytes(buffer["ring_bytes"]));
  }
  fmt::print("\n");
  for (const json& buffer : buffers) {
    fmt::print("{}: BufferOptions::heap_bytes = {}, low_latency.bytes = {}\n", buffer["mode"].get<std::string>(),
               buffer["options"]["heap_bytes"].dump(), buffer["options"]["low_latency_bytes"].dump());
  }
}

int run_size(SizeCommand size) {
  size.ranks_per_node = std::min(size.ranks_per_node, size.ranks);
  if (size.ranks % size.ranks_per_node != 0) {
    fail<InvalidArgument>("--ranks-per-node {}: must divide the {} ranks", size.ranks_per_node, size.ranks);
  }
  if (size.experts % size.ranks != 0) {
    fail<InvalidArgument>("--experts {}: must be a multiple of the {} ranks", size.experts, size.ranks);
  }
  const json buffers = size_buffers(size);
  if (!size.json) {
    print_table(size, buffers);
    return 0;
  }
  print_json({{"ranks", size.ranks},
              {"ranks_per_node", size.ranks_per_node},
              {"nodes", size.nodes()},
              {"tokens", size.tokens},
              {"low_latency_tokens", size.low_latency_tokens},
              {"hidden", size.hidden},
              {"topk", size.topk},
              {"experts", size.experts},
              {"dtype", size.dtype},
              {"buffers", buffers}});
  return 0;
}

}  // namespace

void add_size_command(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("size", "Print what buffers take, before anything is allocated");
  auto size = std::make_shared<SizeCommand>();
  const auto add = [&](const char* name, auto& value, const char* help) {
    return command->add_option(name, value, help)->capture_default_str();
  };
  add("--ranks", size->ranks, "Ranks")->check(CLI::Range(1, kMaxRanks));
  add("--ranks-per-node", size->ranks_per_node, "Ranks of a node, at most all")->check(CLI::Range(1, kMaxRanks));
  add("--tokens", size->tokens, "Tokens of each rank, normal mode")->check(CLI::Range(0, 1 << 20));
  add("--low-latency-tokens", size->low_latency_tokens, "Tokens of each rank in low-latency calls; 0: no such calls")
      ->check(CLI::Range(0, 1 << 16));
  add("--hidden", size->hidden, "Channels of a token")->check(CLI::Range(1, 1 << 20));
  add("--topk", size->topk, "Experts of each token")->check(CLI::Range(1, kMaxTopk));
  add("--experts", size->experts, "Experts of all ranks")->check(CLI::Range(1, 1 << 16));
  add("--dtype", size->dtype, "Rows of normal mode's dispatch: bf16, or fp8 with a scale for 128 channels")
      ->check(CLI::IsMember({"bf16", "fp8"}));
  command->add_flag("--json", size->json, "Print JSON, sizes in bytes");
  command->callback([size, &action] { action = [size] { return run_size(*size); }; });
}

}  // namespace deep_ep::tools
