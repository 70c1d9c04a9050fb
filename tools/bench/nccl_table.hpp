// What nccl-tests (all_reduce_perf and its relatives) print.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/bench/output/figure.hpp"

namespace deep_ep::tools {

struct NcclOptions {
  std::string collective = {};  ///< "all_reduce", ...; empty: as the text says
  int ranks = 0;                ///< 0: as the text says, or as the bandwidths do
  bool allow_partial = false;   ///< a table without its last lines will do
};

struct NcclReport {
  std::vector<Figure> figures;        ///< of each size out of place, and in place
  std::vector<std::string> tables;    ///< a sentence about each table
  std::vector<std::string> mistakes;  ///< wrong data, bandwidths that do not fit: with line numbers
};

/// Lines around tables may be anything: mpirun's marks in front of lines and NCCL's own log lines are passed over.
/// @throws InvalidArgument, with `name` and the line, for what is no such table.
NcclReport parse_nccl_tests(const std::string& text, const std::string& name, const NcclOptions& options);

/// busbw / algbw of a collective of `ranks` ranks. @throws InvalidArgument for a name that is none.
double bus_factor(const std::string& collective, int ranks);

}  // namespace deep_ep::tools
