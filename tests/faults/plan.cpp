#include "tests/faults/plan.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "csrc/support/format.hpp"
#include "oracle/random.hpp"
#include "tests/support/time_scale.hpp"

namespace deep_ep::faults {
namespace {

using test::Topology;
using Kind = Step::Kind;

constexpr std::int64_t kMostTokens = 5;
constexpr std::int64_t kHidden = 256;

/// Numbers of very different size, all equally likely in size.
int of_any_size(oracle::Random& random, double most) {
  return static_cast<int>(std::exp(random.unit() * std::log(most)));
}

std::vector<Step> make_steps(oracle::Random& random, bool normal) {
  std::vector<Step> steps;
  const auto rounds = 1 + random.below(3);
  for (std::int64_t round = 0; round < rounds; ++round) {
    const int data = static_cast<int>(random.below(2));
    if (normal && random.chance(0.5)) {
      steps.push_back({.kind = Kind::dispatch, .data = data});
      if (random.chance(0.4)) steps.push_back({.kind = Kind::cached, .data = data});
      if (random.chance(0.8)) steps.push_back({.kind = Kind::combine, .data = data, .heap = random.chance(0.5)});
    } else {
      steps.push_back({.kind = Kind::low_latency_dispatch, .data = data, .hook = random.chance(0.4)});
      if (random.chance(0.8)) {
        steps.push_back({.kind = Kind::low_latency_combine, .data = data, .hook = random.chance(0.4)});
      }
    }
  }
  return steps;
}

}  // namespace

const char* name_of(Fault fault) {
  constexpr const char* kNames[kFaults] = {"none",   "delay", "stop",      "freeze", "pause",  "memory",
                                           "set_up", "nic",   "bootstrap", "kill",   "suspend"};
  return kNames[static_cast<std::size_t>(fault)];
}

Fault fault_of(const std::string& name) {
  std::string names;
  for (int i = 0; i < kFaults; ++i) {
    const auto fault = static_cast<Fault>(i);
    if (name == name_of(fault)) return fault;
    names += std::string(" ") + name_of(fault);
  }
  throw std::invalid_argument("fault '" + name + "', allowed:" + names);
}

const char* name_of(Step::Kind kind) {
  constexpr const char* kNames[] = {"dispatch", "cached_dispatch", "combine", "low_latency_dispatch",
                                    "low_latency_combine"};
  return kNames[static_cast<std::size_t>(kind)];
}

Fault pick_fault(std::uint64_t seed) {
  oracle::Random random(oracle::derive_seed(seed, 1));
  if (random.chance(0.04)) return random.chance(0.6) ? Fault::kill : Fault::suspend;
  // Stops within a kernel are the widest field.
  static constexpr Fault kFrequent[] = {Fault::freeze, Fault::pause, Fault::stop, Fault::nic};
  if (random.chance(0.5)) return random.pick(kFrequent);
  return static_cast<Fault>(random.below(static_cast<std::int64_t>(Fault::bootstrap) + 1));
}

Plan make_plan(std::uint64_t seed, Fault fault) {
  oracle::Random random(oracle::derive_seed(seed, 2));
  Plan plan{.seed = seed, .fault = fault};
  plan.ranks = static_cast<int>(2 + random.below(test::under_thread_sanitizer() ? 2 : 3));
  static constexpr Topology kTopologies[] = {Topology::one_node, Topology::one_node, Topology::only_rdma,
                                             Topology::two_nodes, Topology::rails};
  static constexpr Topology kFar[] = {Topology::only_rdma, Topology::two_nodes, Topology::rails};
  plan.topology = fault == Fault::nic ? random.pick(kFar) : random.pick(kTopologies);
  if (plan.topology == Topology::rails) plan.ranks = 4;
  plan.masking = plan.topology != Topology::rails && random.chance(0.4);
  // Calls with masks end without an error, calls of normal mode do not.
  const bool normal = plan.topology != Topology::only_rdma && !plan.masking;
  plan.host = {.multiprocessors = static_cast<int>(1 + random.below(2)),
               .warps_per_block = 2,
               .seed = random.chance(0.1) ? random.next() | 1 : 0};
  plan.steps = make_steps(random, normal);

  plan.rank = static_cast<int>(random.below(plan.ranks));
  plan.step = static_cast<int>(random.below(static_cast<std::int64_t>(plan.steps.size())));
  plan.peer = static_cast<int>((plan.rank + 1 + random.below(plan.ranks - 1)) % plan.ranks);
  // Normal mode sends to rails only.
  const bool to_rail = fault == Fault::nic && !plan.steps[static_cast<std::size_t>(plan.step)].low_latency();
  if (to_rail) plan.peer = (plan.rank + plan.ranks_per_node()) % plan.ranks;
  plan.credit = random.chance(0.5);
  switch (fault) {
    case Fault::delay:
      plan.event = of_any_size(random, 3000);
      plan.hold = 0.02 + 0.1 * random.unit();
      break;
    case Fault::pause:
      plan.event = of_any_size(random, 3000);
      plan.hold = 1.2 + 0.5 * random.unit();
      break;
    case Fault::freeze:
      plan.event = of_any_size(random, 3000);
      break;
    case Fault::kill:
    case Fault::suspend:
      plan.event = random.chance(0.2) ? 0 : of_any_size(random, 3000);
      plan.hold = 1.2 + random.unit();
      break;
    case Fault::memory:
      plan.event = static_cast<int>(1 + random.below(3));
      break;
    case Fault::set_up:
      plan.event = static_cast<int>(1 + random.below(12));
      break;
    case Fault::bootstrap:
      plan.event = static_cast<int>(1 + random.below(14));
      break;
    default:
      break;
  }
  return plan;
}

std::string Plan::describe() const {
  std::string text = fmt::format("seed {}: {} of rank {} of {} ({}{}{}), ", seed, name_of(fault), rank, ranks,
                                 to_string(test::Where{.topology = topology}), masking ? ", masks" : "",
                                 host.seed != 0 ? ", seeded schedule" : "");
  text += fmt::format("call {}, event {}, peer {}{}, hold {:.2f};", step, event, peer, credit ? " (credit)" : "", hold);
  for (const Step& one : steps) text += fmt::format(" {}{}", name_of(one.kind), one.hook ? "+hook" : "");
  return text;
}

Data make_data(const Plan& plan) {
  Data data;
  for (std::uint64_t i = 0; i < 2; ++i) {
    const std::uint64_t seed = oracle::derive_seed(plan.seed, 10 + i);
    oracle::Random random(seed);
    static constexpr oracle::Routing kRoutings[] = {oracle::Routing::uniform, oracle::Routing::some_dropped,
                                                    oracle::Routing::one_hot_expert};
    const auto counts =
        oracle::make_token_counts(random.chance(0.7) ? oracle::TokenCounts::equal : oracle::TokenCounts::different,
                                  plan.ranks, kMostTokens, seed);
    data.normal[i] = test::make_case({.tokens = counts,
                                      .local_experts = 2,
                                      .topk = 2,
                                      .routing = random.pick(kRoutings),
                                      .combine_hidden = 64,
                                      .ranks_per_node = plan.ranks_per_node(),
                                      .seed = seed});
    data.low_latency[i] = test::make_low_latency_combine_case({.tokens = counts,
                                                               .max_tokens = kMostTokens,
                                                               .hidden = kHidden,
                                                               .local_experts = 2,
                                                               .topk = 2,
                                                               .routing = random.pick(kRoutings),
                                                               .format = oracle::RowFormat::bf16,
                                                               .seed = seed});
    fill_by_token(data.low_latency[i]);
    data.low_latency[i].options.ranks_per_node = plan.ranks_per_node();
  }
  return data;
}

void fill_by_token(test::LowLatencyCombineCase& one) {
  const oracle::LowLatencyShape& shape = one.before.dispatched.shape;
  const auto hidden = static_cast<std::size_t>(one.hidden);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    const oracle::LowLatencyReceived& received = one.before.dispatched.received[static_cast<std::size_t>(rank)];
    for (std::size_t i = 0; i < received.layout_range.size(); ++i) {  // [local expert, source]
      const std::size_t expert = i / static_cast<std::size_t>(shape.ranks);
      const std::int64_t range = received.layout_range[i];
      for (std::int64_t n = 0; n < (range & 0xffffffff); ++n) {
        const auto row =
            expert * static_cast<std::size_t>(shape.expert_rows()) + static_cast<std::size_t>((range >> 32) + n);
        const auto token = static_cast<std::uint64_t>(received.src_info[row]);
        const std::uint64_t key = ((static_cast<std::uint64_t>(rank) << 8 | i) << 16) | token;
        const auto values = test::random_bf16(one.hidden, oracle::derive_seed(one.before.shape.seed, 1000 + key));
        std::copy(values.begin(), values.end(),
                  one.inputs[static_cast<std::size_t>(rank)].x.begin() + static_cast<std::int64_t>(row * hidden));
      }
    }
  }
}

}  // namespace deep_ep::faults
