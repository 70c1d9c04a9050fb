#include "tools/bench/upstream_lines.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "deep_ep/buffer.hpp"

namespace deep_ep::tools {
namespace {

constexpr int kRdmaChunk = 16;

bool is_cached_or_combine(const Figure& m) {
  return m.median_us && m.by == "deep_ep" && (m.mode == "cached" || m.operation == "combine");
}

std::string between_nodes_line(const Figure& m, double notify_us, bool best) {
  const std::string rates =
      fmt::format("{:.2f} GB/s (RDMA), {:.2f} GB/s (NVL)", m.rdma_gb_per_s.value_or(0), m.gb_per_s.value_or(0));
  const std::string setting = fmt::format("SMs {}, NVL chunk 1, RDMA chunk {}", m.sms.value_or(0), kRdmaChunk);
  // The best combine has its times with a comma in front and two digits, all others with a colon and none.
  if (best && m.operation == "combine") {
    return fmt::format("{}, {:.2f} + {:.2f} us, {}", setting, notify_us, *m.median_us, rates);
  }
  return fmt::format("{}: {:.0f} + {:.0f} us, {}", setting, notify_us, *m.median_us, rates);
}

std::string in_a_node_line(const Figure& m, bool best) {
  const bool comma = best && m.operation == "dispatch";
  return fmt::format("SMs {}, NVL chunk default{} {:.2f} GB/s (NVL), {}: {:.2f} us", m.sms.value_or(0),
                     comma ? "," : ":", m.gb_per_s.value_or(0), best ? "t" : "avg_t", *m.median_us);
}

}  // namespace

double NormalModeLines::notify_us(const Figure& of) const {
  double layout = 0;
  double exchange = 0;
  for (const Figure& m : all_) {
    if (m.tokens != of.tokens) continue;
    if (m.operation == "layout") layout = m.median_us.value_or(0);
    if (m.mode == "exchange" && m.dtype == of.dtype && m.sms == of.sms && m.warps == of.warps) {
      exchange = m.median_us.value_or(0);
    }
  }
  const bool known = of.operation == "dispatch" && exchange > 0;
  return known ? std::max(0.0, exchange - layout - *of.median_us) : 0;
}

void NormalModeLines::print_all_of(const char* operation, const char* dtype, std::int64_t tokens) const {
  const Figure* best = nullptr;
  const bool one_node = options_.nodes == 1;
  for (const Figure& m : all_) {
    if (m.operation != operation || m.dtype != dtype || m.tokens != tokens || !is_cached_or_combine(m)) continue;
    if (tune_) {
      fmt::print("[tuning] {}\n",
                 one_node ? in_a_node_line(m, false) : between_nodes_line(m, notify_us(m), false) + " ");
    }
    if (best == nullptr || *m.median_us < *best->median_us) best = &m;
  }
  if (best == nullptr) return;
  const std::string what =
      best->operation == "combine" ? "combine" : fmt::format("dispatch ({})", best->dtype == "fp8" ? "FP8" : "BF16");
  fmt::print("[tuning] Best {}: {}\n", what,
             one_node ? in_a_node_line(*best, true) : between_nodes_line(*best, notify_us(*best), true));
}

void NormalModeLines::print_tokens(std::int64_t tokens) const {
  const std::string groups = options_.nodes == 1 ? ""
                                                 : fmt::format("num_topk_groups={}, ",
                                                               options_.groups == 0 ? options_.nodes : options_.groups);
  fmt::print("\n[config] num_tokens={}, hidden={}, {}num_topk={}\n", tokens, options_.hidden, groups, options_.topk);
  for (const Figure& m : all_) {
    if (m.operation != "layout" || m.tokens != tokens) continue;
    fmt::print("[layout] Kernel performance: {:.3f} ms\n\n", m.median_us.value_or(0) * 1e-3);
  }
  print_all_of("dispatch", "fp8", tokens);
  print_all_of("dispatch", "bf16", tokens);
  print_all_of("combine", "bf16", tokens);
}

void NormalModeLines::print() const {
  for (const std::int64_t tokens : options_.tokens) print_tokens(tokens);
}

const Figure* LowLatencyLines::find(const char* operation, const char* variant, const char* part,
                                    std::int64_t tokens) const {
  const auto found = std::ranges::find_if(all_, [&](const Figure& m) {
    const std::string& of = m.operation == "combine" ? m.mode : m.dtype;
    return m.operation == operation && of == variant && m.part == part && m.tokens == tokens && m.mean_us;
  });
  return found == all_.end() ? nullptr : &*found;
}

/// Upstream divides by the mean, the column gb_per_s by the time back to back.
double LowLatencyLines::rate_of_mean(const Figure& m) {
  return m.gb_per_s.value_or(0) * (m.pipelined_us ? *m.pipelined_us : *m.median_us) / *m.mean_us;
}

void LowLatencyLines::print_tokens(std::int64_t tokens) const {
  const std::size_t bytes =
      Buffer::low_latency_bytes_hint(static_cast<int>(tokens), options_.hidden, ranks_, options_.experts);
  fmt::print("\nAllocating buffer size: {} MB ...\n", static_cast<double>(bytes) * 1e-6);
  if (const auto* both = find("dispatch+combine", "fp8", "whole", tokens)) {
    fmt::print(
        "[rank 0] Dispatch + combine bandwidth: {:.2f} GB/s, avg_t={:.2f} us, min_t={:.2f} us, max_t={:.2f} us\n",
        rate_of_mean(*both), *both->mean_us, both->min_us.value_or(0), both->max_us.value_or(0));
  }
  const char* dispatched = options_.dtype == "bf16" ? "bf16" : "fp8";
  const auto* dispatch = find("dispatch", dispatched, "whole", tokens);
  const auto* combine = find("combine", "plain", "whole", tokens);
  if (dispatch != nullptr && combine != nullptr) {
    fmt::print(
        "[rank 0] Dispatch bandwidth: {:.2f} GB/s, avg_t={:.2f} us | Combine bandwidth: {:.2f} GB/s, avg_t={:.2f} us\n",
        rate_of_mean(*dispatch), *dispatch->mean_us, rate_of_mean(*combine), *combine->mean_us);
  }
  const auto* send = find("dispatch", dispatched, "send", tokens);
  const auto* receive = find("dispatch", dispatched, "receive", tokens);
  const auto* back = find("combine", "plain", "send", tokens);
  const auto* add = find("combine", "plain", "receive", tokens);
  if (send == nullptr || receive == nullptr || back == nullptr || add == nullptr) return;
  fmt::print("[rank 0] Dispatch send/recv time: {:.2f} + {:.2f} us | Combine send/recv time: {:.2f} + {:.2f} us\n",
             *send->mean_us, *receive->mean_us, *back->mean_us, *add->mean_us);
}

void LowLatencyLines::print() const {
  for (const std::int64_t tokens : options_.tokens) print_tokens(tokens);
}

}  // namespace deep_ep::tools
