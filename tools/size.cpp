// `deep_ep size`: what buffers take, before anything is allocated. All numbers come from where the library has its own.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "csrc/support/format.hpp"
#include "deep_ep/buffer.hpp"
#include "deep_ep/error.hpp"
#include "kernels/common/limits.hpp"
#include "tools/commands.hpp"
#include "tools/common/buffer_sizes.hpp"
#include "tools/common/json_output.hpp"

namespace deep_ep::tools {
namespace {

struct SizeCommand : BufferSizes {
  int sms = 0;
  bool json = false;
};

int sms_of(const SizeCommand& size, const Config& config) { return size.sms != 0 ? size.sms : config.num_sms; }

nlohmann::json buffer_json(const SizedBuffer& buffer) {
  const HeapLayout& layout = buffer.plan.layout;
  return {{"mode", buffer.mode},
          {"options",
           {{"heap_bytes", buffer.options.heap_bytes},
            {"max_local_experts", buffer.options.max_local_experts},
            {"low_latency_bytes", buffer.options.low_latency.bytes}}},
          {"heap_bytes", layout.bytes()},
          {"parts",
           {{"received", buffer.received_bytes()},
            {"window", layout.window_bytes},
            {"low_latency", layout.low_latency.bytes},
            {"staging", layout.staging.bytes},
            {"signals", buffer.signal_bytes()}}},
          {"rdma_bytes", buffer.registered_bytes()},
          {"queue_pairs", buffer.plan.queue_pairs()},
          {"ring_bytes", buffer.ring_bytes()}};
}

void print_as_json(const SizeCommand& size, const std::vector<SizedBuffer>& buffers) {
  nlohmann::json all = nlohmann::json::array();
  for (const SizedBuffer& buffer : buffers) all.push_back(buffer_json(buffer));
  print_json({{"ranks", size.ranks},
              {"ranks_per_node", size.ranks_per_node},
              {"nodes", size.nodes()},
              {"tokens", size.tokens},
              {"low_latency_tokens", size.low_latency_tokens},
              {"hidden", size.hidden},
              {"topk", size.topk},
              {"experts", size.experts},
              {"dtype", size.dtype},
              {"sms",
               {{"dispatch", sms_of(size, Config::dispatch_default(size.ranks))},
                {"combine", sms_of(size, Config::combine_default(size.ranks))}}},
              {"buffers", all}});
}

void print_as_table(const SizeCommand& size, const std::vector<SizedBuffer>& buffers) {
  fmt::print("On each of {} ranks, {} a node: {} tokens of {} channels ({}), top-{} of {} experts", size.ranks,
             size.ranks_per_node, size.tokens, size.hidden, size.dtype, size.topk, size.experts);
  fmt::print("; low-latency calls of {} tokens\n\n", size.low_latency_tokens);
  constexpr const char* kLine = "{:<13}{:>11}{:>11}{:>11}{:>13}{:>11}{:>11}{:>11}{:>7}{:>11}\n";
  fmt::print(kLine, "buffer", "heap", "received", "window", "low latency", "staging", "signals", "RDMA", "pairs",
             "rings");
  for (const SizedBuffer& buffer : buffers) {
    const HeapLayout& layout = buffer.plan.layout;
    fmt::print(kLine, buffer.mode, format_bytes(layout.bytes()), format_bytes(buffer.received_bytes()),
               format_bytes(layout.window_bytes), format_bytes(layout.low_latency.bytes),
               format_bytes(layout.staging.bytes), format_bytes(buffer.signal_bytes()),
               format_bytes(buffer.registered_bytes()), buffer.plan.queue_pairs(), format_bytes(buffer.ring_bytes()));
  }
  fmt::print("\n");
  for (const SizedBuffer& buffer : buffers) {
    fmt::print("{}: BufferOptions::heap_bytes = {}, low_latency.bytes = {}\n", buffer.mode, buffer.options.heap_bytes,
               buffer.options.low_latency.bytes);
  }
  fmt::print("SMs of a call: dispatch {}, combine {}; no buffer depends on them\n",
             sms_of(size, Config::dispatch_default(size.ranks)), sms_of(size, Config::combine_default(size.ranks)));
}

int run_size(SizeCommand size) {
  size.ranks_per_node = std::min(size.ranks_per_node, size.ranks);
  if (size.ranks % size.ranks_per_node != 0) {
    throw InvalidArgument(
        fmt::format("--ranks-per-node {}: must divide the {} ranks", size.ranks_per_node, size.ranks));
  }
  if (size.experts % size.ranks != 0) {
    throw InvalidArgument(fmt::format("--experts {}: must be a multiple of the {} ranks", size.experts, size.ranks));
  }
  const std::vector<SizedBuffer> buffers = size_buffers(size);
  size.json ? print_as_json(size, buffers) : print_as_table(size, buffers);
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
  add("--sms", size->sms, "SMs of a call of normal mode; 0: the library's choice")->check(CLI::Range(0, 4096));
  command->add_flag("--json", size->json, "Print JSON, sizes in bytes");
  command->callback([size, &action] { action = [size] { return run_size(*size); }; });
}

}  // namespace deep_ep::tools
