// One rank's part in the cases of `deep_ep bench selftest`.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "deep_ep/buffer.hpp"
#include "oracle/normal.hpp"
#include "tools/bench/inputs.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {

struct SelftestCase {
  bool previous = false;  ///< the call waits for an event
  bool async = false;     ///< the program waits for the call's event
  bool fp8 = false;
  bool topk = false;
  bool worst = false;  ///< outputs of a fixed size, without waiting for the counts

  std::string name() const;
};

/// DeepEP's matrix: {BF16 twice, FP8; between nodes FP8 twice} x top-k x async x previous.
std::vector<SelftestCase> selftest_cases(int nodes);

/// What every rank must get, rows and selections included.
class SelftestTruth {
 public:
  explicit SelftestTruth(const WorkloadShape& shape);

  const oracle::Received& received(int rank, bool fp8, bool topk) const {
    return dispatched_[index(fp8, topk)].received[static_cast<std::size_t>(rank)];
  }
  const oracle::Combined& combined(int rank, bool topk) const {
    return combined_[topk ? 1 : 0][static_cast<std::size_t>(rank)];
  }

 private:
  static std::size_t index(bool fp8, bool topk) { return (fp8 ? 2 : 0) + (topk ? 1 : 0); }
  oracle::Dispatched dispatched_[4];
  std::vector<oracle::Combined> combined_[2];
};

class SelftestRank {
 public:
  /// Collective. `shape` and `truth` must outlive the object.
  SelftestRank(const WorkloadShape& shape, const SelftestTruth& truth, const std::shared_ptr<Bootstrap>& bootstrap,
               const std::shared_ptr<Executor>& executor);

  /// Collective. Dispatch, dispatch along the same routes, and combine. @throws Error at the first difference.
  void run(const SelftestCase& one);
  /// Collective; the object must not be used any more.
  void destroy();

 private:
  CallOptions call(const SelftestCase& one);
  void finish(const SelftestCase& one, const EventHandle& event);
  DispatchResult dispatch(const SelftestCase& one);
  Tensor dispatch_again(const SelftestCase& one, const DispatchHandle& handle, bool fp8);
  void combine(const SelftestCase& one, const DispatchResult& received, const TensorView& rows);
  void check_rows(const char* what, const TensorView& tensor, const void* expected, std::size_t bytes);

  const WorkloadShape& shape_;
  const SelftestTruth& truth_;
  Executor& executor_;
  int rank_;
  Stream stream_;
  Buffer buffer_;
  RankInputs inputs_;
};

}  // namespace deep_ep::tools
