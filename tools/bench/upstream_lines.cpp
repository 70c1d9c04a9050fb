#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "deep_ep/buffer.hpp"
#include "tools/bench/benchmark.hpp"

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

/// How much longer a dispatch with its exchange of counts takes than one along known routes.
double notify_us(const std::vector<Figure>& all, const Figure& of) {
  double layout = 0;
  double exchange = 0;
  for (const Figure& m : all) {
    if (m.tokens != of.tokens) continue;
    if (m.operation == "layout") layout = m.median_us.value_or(0);
    if (m.mode == "exchange" && m.dtype == of.dtype && m.sms == of.sms) {
      exchange = m.median_us.value_or(0);
    }
  }
  const bool known = of.operation == "dispatch" && exchange > 0;
  return known ? std::max(0.0, exchange - layout - *of.median_us) : 0;
}

std::string tuning_lines(const std::vector<Figure>& all, const char* operation, const char* dtype, std::int64_t tokens,
                         bool tune) {
  std::string text;
  std::string best_line;
  double best = 0;
  for (const Figure& m : all) {
    const bool fits = m.operation == operation && m.dtype == dtype && m.tokens == tokens;
    if (!fits || !is_cached_or_combine(m)) continue;
    const auto line = [&](bool is_best) {
      return m.nodes == 1 ? in_a_node_line(m, is_best) : between_nodes_line(m, notify_us(all, m), is_best);
    };
    if (tune) text += fmt::format("[tuning] {}{}\n", line(false), m.nodes == 1 ? "" : " ");
    if (!best_line.empty() && *m.median_us >= best) continue;
    best = *m.median_us;
    best_line = line(true);
  }
  if (best_line.empty()) return text;
  const std::string what = operation == std::string_view("combine") ? "combine"
                           : dtype == std::string_view("fp8")       ? "dispatch (FP8)"
                                                                    : "dispatch (BF16)";
  return text + fmt::format("[tuning] Best {}: {}\n", what, best_line);
}

/// Upstream divides by the mean, the column gb_per_s by the time back to back.
double rate_of_mean(const Figure& m) {
  return m.gb_per_s.value_or(0) * (m.pipelined_us ? *m.pipelined_us : *m.median_us) / *m.mean_us;
}

}  // namespace

std::string normal_mode_lines(const BenchOptions& options, bool tune, const std::vector<Figure>& figures) {
  std::string text;
  for (const std::int64_t tokens : options.tokens) {
    const int groups = options.groups == 0 ? options.nodes : options.groups;
    text += fmt::format("\n[config] num_tokens={}, hidden={}, {}num_topk={}\n", tokens, options.hidden,
                        options.nodes == 1 ? "" : fmt::format("num_topk_groups={}, ", groups), options.topk);
    for (const Figure& m : figures) {
      if (m.operation != "layout" || m.tokens != tokens) continue;
      text += fmt::format("[layout] Kernel performance: {:.3f} ms\n\n", m.median_us.value_or(0) * 1e-3);
    }
    text += tuning_lines(figures, "dispatch", "fp8", tokens, tune);
    text += tuning_lines(figures, "dispatch", "bf16", tokens, tune);
    text += tuning_lines(figures, "combine", "bf16", tokens, tune);
  }
  return text;
}

std::string low_latency_lines(const BenchOptions& options, int ranks, const std::vector<Figure>& figures) {
  std::string text;
  for (const std::int64_t tokens : options.tokens) {
    const auto find = [&](const char* operation, const char* variant, const char* part) {
      const auto found = std::ranges::find_if(figures, [&](const Figure& m) {
        const std::string& of = m.operation == "combine" ? m.mode : m.dtype;
        return m.operation == operation && of == variant && m.part == part && m.tokens == tokens && m.mean_us;
      });
      return found == figures.end() ? nullptr : &*found;
    };
    const std::size_t bytes =
        Buffer::low_latency_bytes_hint(static_cast<int>(tokens), options.hidden, ranks, options.experts);
    text += fmt::format("\nAllocating buffer size: {} MB ...\n", static_cast<double>(bytes) * 1e-6);
    if (const auto* both = find("dispatch+combine", "fp8", "whole")) {
      text += fmt::format(
          "[rank 0] Dispatch + combine bandwidth: {:.2f} GB/s, avg_t={:.2f} us, min_t={:.2f} us, max_t={:.2f} us\n",
          rate_of_mean(*both), *both->mean_us, both->min_us.value_or(0), both->max_us.value_or(0));
    }
    const char* dispatched = options.dtype == "bf16" ? "bf16" : "fp8";
    const auto* dispatch = find("dispatch", dispatched, "whole");
    const auto* combine = find("combine", "plain", "whole");
    if (dispatch != nullptr && combine != nullptr) {
      text += fmt::format(
          "[rank 0] Dispatch bandwidth: {:.2f} GB/s, avg_t={:.2f} us | Combine bandwidth: {:.2f} GB/s, avg_t={:.2f} "
          "us\n",
          rate_of_mean(*dispatch), *dispatch->mean_us, rate_of_mean(*combine), *combine->mean_us);
    }
    const auto* send = find("dispatch", dispatched, "send");
    const auto* receive = find("dispatch", dispatched, "receive");
    const auto* back = find("combine", "plain", "send");
    const auto* add = find("combine", "plain", "receive");
    if (send == nullptr || receive == nullptr || back == nullptr || add == nullptr) continue;
    text += fmt::format(
        "[rank 0] Dispatch send/recv time: {:.2f} + {:.2f} us | Combine send/recv time: {:.2f} + {:.2f} us\n",
        *send->mean_us, *receive->mean_us, *back->mean_us, *add->mean_us);
  }
  return text;
}

}  // namespace deep_ep::tools
