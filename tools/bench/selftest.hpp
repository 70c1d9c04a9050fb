// Is this installation able to do what it is for? Small cases of every kind, compared with the oracle.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/bench/world.hpp"

namespace deep_ep::tools {

struct SelftestOptions {
  std::string device = "auto";
  double seconds = 120;  ///< for processes of their own to end
};

enum class SelftestOutcome : std::uint8_t { pass, skip, fail };

struct SelftestStage {
  std::string name;  ///< "one rank", "two ranks", "two nodes", "two processes"
  SelftestOutcome outcome = SelftestOutcome::pass;
  int cases = 0;        ///< that are right
  double seconds = 0;   ///< it took
  std::string found{};  ///< of a failure: what was wrong; of what was left out: why

  std::string text() const;
  nlohmann::json json() const;
};

/// Lines as DeepEP's tests print them: "[testing] Running with BF16, with top-k (async=False, previous=False) ...
/// passed"
using SelftestPrinter = std::function<void(const std::string&)>;

/// All stages, each on this process's threads or on processes that it starts.
std::vector<SelftestStage> run_selftest(const SelftestOptions& options, const SelftestPrinter& print);

/// One stage, for the ranks of `world`: all cases of normal mode and low latency. Collective. `nodes`: that they play.
SelftestStage run_selftest_stage(const std::string& name, const World& world, int nodes, Device::Kind device,
                                 const SelftestPrinter& print);

}  // namespace deep_ep::tools
