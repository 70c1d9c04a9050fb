// The data of a benchmark. Every value follows from (rank, token, position), so that a rank can work out by itself what
// its peers send.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "oracle/normal.hpp"

namespace deep_ep::tools {

struct WorkloadShape {
  int ranks = 8;
  std::int64_t tokens = 4096;  ///< of each rank
  int hidden = 7168;
  int topk = 8;
  int experts = 256;
  std::size_t window_bytes = 0;  ///< of the buffer, 0 = the library's default

  int local_experts() const { return experts / ranks; }
  int scales() const { return (hidden + 127) / 128; }  ///< float32 scales of an 8-bit row
  std::int64_t row_bytes_8bit() const { return hidden + std::int64_t{scales()} * 4; }
  std::int64_t row_bytes_bf16() const { return std::int64_t{hidden} * 2; }
  std::int64_t row_bytes_logfmt() const { return std::int64_t{hidden} * 10 / 8 + hidden / 128 * 4; }
};

/// InvalidArgument, in terms of the command line, when `ranks` ranks cannot share the experts.
void check_workload(int ranks, int topk, int experts);

/// [tokens, topk] distinct experts of each token, uniformly random.
std::vector<std::int64_t> make_selection(const WorkloadShape& shape, int rank);

/// The rows of `rank`. Values of BF16 rows are small whole numbers, so that sums of a few are exact in fp32.
void fill_row_bf16(int rank, std::int64_t token, std::span<std::uint16_t> row);
void fill_row_8bit(int rank, std::int64_t token, std::span<std::uint8_t> row);
void fill_scales(int rank, std::int64_t token, std::span<float> row);

/// Who sends what to whom.
class Routes {
 public:
  explicit Routes(const WorkloadShape& shape);

  /// Rows from `source` to `destination`.
  std::int64_t rows(int source, int destination) const;
  std::int64_t total() const;
  std::int64_t total_between_ranks() const;
  /// Which rows a rank receives, without their bytes.
  const oracle::Received& received_by(int rank) const { return dispatched_.received[static_cast<std::size_t>(rank)]; }
  /// On how many ranks the token has experts.
  int fan_out(int source, std::int64_t token) const;

 private:
  WorkloadShape shape_;
  oracle::Dispatched dispatched_;
};

}  // namespace deep_ep::tools
