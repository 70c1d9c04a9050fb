// Measures dispatch and combine inside one node, and what other means need for the same bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tools/bench/options.hpp"

namespace deep_ep::tools {

struct IntranodeOptions : BenchOptions {
  std::vector<int> sms;       ///< 0 = the library's default
  int window_mib = 0;         ///< of the buffer, 0 = the library's default
  std::vector<int> warps{0};  ///< of a block; 0 = the library's default
  std::string mode = "both";  ///< of combine: pull, push, both
  bool peers = true;
  bool uncached = true;  ///< also layout, and dispatch that exchanges counts
};

/// One line of the result.
struct Measurement {
  std::string operation{};  ///< "layout", "dispatch", "layout+notify+dispatch", "combine"
  std::string dtype{};      ///< of the rows: "fp8", "bf16", or "-"
  std::string mode{};       ///< combine: "pull", "push"; dispatch: "cached", "exchange"; or "-"
  std::string transport{};  ///< "deep_ep", "NCCL 2.30.7", "copy engine"
  int warps = 0;            ///< of a block, 0 = the library's default
  int sms = 0;              ///< -1 = unknown
  std::int64_t tokens = 0;
  Timing timing{};
  double logical_bytes = 0;  ///< a rank receives, own rows included (combine: sends), mean over ranks
  double wire_bytes = 0;     ///< of those, the bytes that cross between ranks

  double logical_gb_per_s() const { return timing.median > 0 ? logical_bytes / timing.median * 1e-9 : 0; }
  double wire_gb_per_s() const { return timing.median > 0 ? wire_bytes / timing.median * 1e-9 : 0; }
};

/// Collective over the processes. `report` is called for each measurement as it is made, on global rank 0's process.
/// Throws when --check finds a difference.
void run_intranode(const IntranodeOptions& options, const World& world, Device::Kind device,
                   const std::function<void(const Measurement&)>& report);

}  // namespace deep_ep::tools
