#include "tools/bench/options.hpp"

#include <fmt/format.h>

#include "deep_ep/error.hpp"
#include "tools/common/ranks.hpp"
#include "tools/common/variables.hpp"

namespace deep_ep::tools {

World make_world(const BenchOptions& options, int& nodes) {
  check_environment();
  const int playing_nodes = options.ranks_per_node * nodes;
  World world = make_world(playing_nodes != 0 ? playing_nodes : options.ranks, options.ranks_per_node, options.device);
  if (world.nodes != 0) nodes = world.nodes;
  return world;
}

void complete(const BenchKind& kind, BenchOptions& options, Device::Kind device, int ranks) {
  const bool gpu = device == Device::Kind::cuda;
  const BenchSizes& sizes = options.quick ? (gpu ? kind.quick_gpu : kind.quick_cpu) : (gpu ? kind.gpu : kind.cpu);
  options.check = options.check || options.quick;
  if (options.tokens.empty()) options.tokens = {sizes.tokens};
  if (options.hidden == 0) options.hidden = sizes.hidden;
  if (options.experts == 0) options.experts = (sizes.experts + ranks - 1) / ranks * ranks;
  if (options.rounds.count == 0) options.rounds.count = sizes.rounds;
  if (options.rounds.warmup < 0) options.rounds.warmup = sizes.warmup;
  check_workload(ranks, options.topk, options.experts);
  if (options.hidden % kind.limits.hidden_multiple != 0) {
    throw InvalidArgument(
        fmt::format("--hidden {}: must be a multiple of {}", options.hidden, kind.limits.hidden_multiple));
  }
}

void print_setting(const BenchOptions& options, const World& world, Device::Kind device) {
  fmt::print("{} ranks ({}) on {}; hidden {}, top-{} of {} experts, uniform routing; {} rounds after {} to warm up\n",
             world.size, world.kind, device == Device::Kind::cuda ? "a GPU each" : "the CPU (not a measure of speed)",
             options.hidden, options.topk, options.experts, options.rounds.count, options.rounds.warmup);
}

nlohmann::json setting_json(const BenchKind& kind, const BenchOptions& options, const World& world,
                            Device::Kind device) {
  return {{"benchmark", kind.name},     {"device", name_of(device)},      {"ranks", world.size},
          {"ranks_are", world.kind},    {"hidden", options.hidden},       {"topk", options.topk},
          {"experts", options.experts}, {"rounds", options.rounds.count}, {"warmup", options.rounds.warmup},
          {"checked", options.check}};
}

Figure setting_figure(const BenchKind& kind, const BenchOptions& options, const World& world, Device::Kind device) {
  Figure figure;
  figure.benchmark = kind.name;
  figure.by = "deep_ep";
  figure.device = name_of(device);
  figure.ranks = world.size;
  figure.nodes = 1;
  figure.hidden = options.hidden;
  figure.topk = options.topk;
  figure.experts = options.experts;
  return figure;
}

void set_times(Figure& figure, const Timing& timing) {
  const auto set = [](Figure::Number& number, double seconds) {
    if (seconds > 0) number = seconds * 1e6;
  };
  set(figure.median_us, timing.median);
  set(figure.min_us, timing.fastest);
  set(figure.max_us, timing.slowest);
  set(figure.mean_us, timing.mean);
  set(figure.wall_us, timing.wall);
  set(figure.pipelined_us, timing.back_to_back);
}

std::string show_microseconds(const Figure::Number& us) { return us ? fmt::format("{:.1f}", *us) : "-"; }

std::string show_rate(const Figure::Number& gb_per_s) { return gb_per_s ? fmt::format("{:.4g}", *gb_per_s) : "-"; }

}  // namespace deep_ep::tools
