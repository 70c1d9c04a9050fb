// `deep_ep bench sweep`: many shapes, each measured by a process of its own; results go to a CSV file as they come.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/bench/output/figure.hpp"

namespace deep_ep::tools {

struct SweepOptions {
  std::vector<std::string> modes;  ///< "intranode", "internode", "low-latency"
  std::vector<int> hidden;
  std::vector<int> topk;
  std::vector<int> experts_per_node;
  std::vector<int> groups;  ///< between nodes only
  std::vector<std::int64_t> tokens;
  int ranks = 0;
  int nodes = 2;  ///< between nodes only
  std::string device = "auto";
  std::string file = "sweep.csv";
  std::string launcher;           ///< words in front of each command: "mpirun -np 16"
  double seconds = 600;           ///< for each shape
  std::vector<std::string> more;  ///< options for each benchmark
};

/// What is the same of all measurements of a shape.
struct SweepCell {
  std::string benchmark;
  std::int64_t ranks = 0, nodes = 0, tokens = 0, hidden = 0, topk = 0, experts = 0, groups = 0;

  bool operator==(const SweepCell&) const = default;
  Figure figure() const;
  std::string text() const;
};
SweepCell cell_of(const Figure& figure);
std::vector<SweepCell> cells_of(const SweepOptions& options);
/// Empty, or why there can be no such measurement.
std::string why_impossible(const SweepCell& cell);

/// A sweep's file as another run, or whoever copied it, has left it.
struct SweepFile {
  std::string text;             ///< without what is no whole measurement, and without failures
  std::vector<SweepCell> done;  ///< measured, or impossible
  bool repaired = false;        ///< something was left out
};
/// What was measured on another device than `device` ("cuda", "cpu") stays in the text and is not done.
/// @throws InvalidArgument for a file that is no sweep's.
SweepFile resume_sweep(const std::string& text, const std::string& name, const std::string& device);

struct SweepCounts {
  int measured = 0, impossible = 0, failed = 0, there = 0;
};
SweepCounts run_sweep(const SweepOptions& options);

}  // namespace deep_ep::tools
