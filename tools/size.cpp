// `deep_ep size`: what buffers take, before anything is allocated. All numbers come from where the library has its own.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "csrc/buffer/buffer_plan.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "csrc/rdma/verbs/devx/devx_device.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/buffer.hpp"
#include "deep_ep/error.hpp"
#include "kernels/common/limits.hpp"
#include "tools/commands.hpp"
#include "tools/common/json_output.hpp"

namespace deep_ep::tools {
namespace {

struct SizeOptions {
  int ranks = 8;
  int ranks_per_node = 8;
  std::int64_t tokens = 4096;
  int low_latency_tokens = 128;
  std::int64_t hidden = 7168;
  int topk = 8;
  int experts = 256;
  std::string dtype = "bf16";
  int sms = 0;
  bool json = false;

  int nodes() const { return ranks / ranks_per_node; }
};

/// A buffer that a program may make.
struct SizedBuffer {
  std::string mode;
  BufferOptions options;
  BufferPlan plan;

  /// Bytes that NICs read and write: the heap, where there is a NIC to use.
  std::size_t registered_bytes() const { return plan.queue_pairs() == 0 ? 0 : plan.layout.bytes(); }
  /// Of the rings of queue pairs, as the handler `gpu` has them; others take less.
  std::size_t ring_bytes() const {
    const auto depth = rdma::ConnectionOptions{}.depth;
    return plan.queue_pairs() * rdma::RingLayout::of(depth, rdma::verbs::devx::kRingAlignment).bytes;
  }
  std::size_t received_bytes() const { return plan.layout.bytes() - plan.layout.arena_at(); }
  std::size_t signal_bytes() const { return plan.layout.control.bytes() + plan.layout.internode.bytes; }
};

SizedBuffer sized(const std::string& mode, const BufferOptions& options, int ranks, int ranks_per_node) {
  return {mode, options, BufferPlan::make(options, NodeMembership::of_consecutive(0, ranks, ranks_per_node))};
}

std::vector<SizedBuffer> size_buffers(const SizeOptions& size) {
  const bool wide = size.dtype == "bf16";
  BufferOptions none;
  none.max_local_experts = std::max(none.max_local_experts, size.experts / size.ranks);
  none.low_latency.rails = asked_for_rails(none.low_latency.rails);
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

  std::vector<SizedBuffer> buffers;
  buffers.push_back(sized("intranode", normal_mode(size.ranks_per_node), size.ranks_per_node, size.ranks_per_node));
  if (size.nodes() > 1) buffers.push_back(sized("internode", normal_mode(size.ranks), size.ranks, size.ranks_per_node));
  if (size.low_latency_tokens == 0) return buffers;
  // Its calls need nothing of the heap beside their own part.
  BufferOptions smallest = none;
  smallest.heap_bytes = Buffer::heap_bytes_for(size.ranks, 0);
  buffers.push_back(sized("low_latency", with_low_latency(smallest), size.ranks, size.ranks_per_node));
  buffers.push_back(sized("all", with_low_latency(normal_mode(size.ranks)), size.ranks, size.ranks_per_node));
  return buffers;
}

int sms_of(const SizeOptions& size, const Config& config) { return size.sms != 0 ? size.sms : config.num_sms; }

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

void print_as_json(const SizeOptions& size, const std::vector<SizedBuffer>& buffers) {
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

void print_as_table(const SizeOptions& size, const std::vector<SizedBuffer>& buffers) {
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

int run_size(SizeOptions size) {
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
  auto size = std::make_shared<SizeOptions>();
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
