#include "tools/bench/benchmark.hpp"

#include <algorithm>

#include "csrc/support/format.hpp"
#include "tools/common/ranks.hpp"
#include "tools/common/variables.hpp"

namespace deep_ep::tools {
namespace {

World world_of(BenchOptions& options) {
  check_environment();
  const int ranks = options.ranks_per_node != 0 ? options.ranks_per_node * std::max(1, options.nodes) : options.ranks;
  World world = make_world(ranks, options.ranks_per_node, options.device);
  if (world.nodes != 0 && options.nodes != 0) options.nodes = world.nodes;
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
  check_workload(ranks, options.topk, options.experts, std::max(1, options.nodes), options.groups);
  if (options.hidden % kind.limits.hidden_multiple != 0) {
    fail<InvalidArgument>("--hidden {}: must be a multiple of {}", options.hidden, kind.limits.hidden_multiple);
  }
}

}  // namespace

BenchRun::BenchRun(const BenchKind& kind, BenchOptions& given)
    : options(given),
      world(world_of(options)),
      device(choose_device(options.device, world.local_ranks())),
      speaks(world.first_rank() == 0) {
  complete(kind, options, device, world.size());
  common.benchmark = kind.name;
  common.by = "deep_ep";
  common.device = name_of(device);
  common.ranks = world.size();
  common.nodes = std::max({1, options.nodes, world.nodes});
  common.hidden = options.hidden;
  common.topk = options.topk;
  common.experts = options.experts;
  text = fmt::format(
      "{} ranks ({}) on {}; hidden {}, top-{} of {} experts, uniform routing; {} rounds after {} to warm up\n",
      world.size(), world.kind, device == Device::Kind::cuda ? "a GPU each" : "the CPU (not a measure of speed)",
      options.hidden, options.topk, options.experts, options.rounds.count, options.rounds.warmup);
}

void BenchRun::measure(const RankWork& work) const {
  std::vector<WorkloadShape> shapes;
  for (const std::int64_t tokens : options.tokens) {
    shapes.push_back({world.size(), tokens, options.hidden, options.topk, options.experts, std::max(1, options.nodes),
                      options.groups});
  }
  run_workloads(world, device, shapes, work);
}

Figure figure_of(const Figure& common, const WorkloadShape& shape, const char* operation, const char* dtype,
                 const char* mode) {
  Figure figure = common;
  figure.operation = operation;
  figure.dtype = dtype;
  figure.mode = mode;
  figure.tokens = shape.tokens;
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

}  // namespace deep_ep::tools
