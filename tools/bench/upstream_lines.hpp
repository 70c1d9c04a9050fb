// Lines as DeepEP's own tests print them, so that programs that read their logs read ours as well.
#pragma once

#include <vector>

#include "tools/bench/low_latency.hpp"
#include "tools/bench/normal_mode.hpp"

namespace deep_ep::tools {

/// What test_intranode.py and test_internode.py print: setting, layout, every configuration with `tune`, the best one.
/// They count over NVLink all that is received, and over RDMA also what stays in the node. This library has no chunks
/// inside a node ("default", and 1 where a number has to be) and chunks of 16 rows between nodes.
class NormalModeLines {
 public:
  NormalModeLines(const NormalModeOptions& options, bool tune) : options_(options), tune_(tune) {}
  void add(const Figure& figure) { all_.push_back(figure); }
  void print() const;

 private:
  void print_tokens(std::int64_t tokens) const;
  void print_all_of(const char* operation, const char* dtype, std::int64_t tokens) const;
  double notify_us(const Figure& of) const;

  const NormalModeOptions& options_;
  bool tune_;
  std::vector<Figure> all_;
};

/// What test_low_latency.py prints, where each rank speaks for itself. Here rank 0 gives the slowest rank's times.
class LowLatencyLines {
 public:
  explicit LowLatencyLines(const LowLatencyOptions& options, int ranks) : options_(options), ranks_(ranks) {}
  void add(const Figure& figure) { all_.push_back(figure); }
  void print() const;

 private:
  void print_tokens(std::int64_t tokens) const;
  static double rate_of_mean(const Figure& m);
  const Figure* find(const char* operation, const char* variant, const char* part, std::int64_t tokens) const;

  const LowLatencyOptions& options_;
  int ranks_;
  std::vector<Figure> all_;
};

}  // namespace deep_ep::tools
