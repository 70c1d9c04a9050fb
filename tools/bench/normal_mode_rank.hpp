// One rank of a benchmark of normal mode: its buffer, its inputs, its calls, and whether their results are right.
#pragma once

#include <string>
#include <vector>

#include "deep_ep/buffer.hpp"
#include "tools/bench/world.hpp"
#include "tools/common/ranks.hpp"

namespace deep_ep::tools {

struct NormalModeCall {
  bool fp8 = false;       ///< 8-bit rows with scales; otherwise BF16
  bool topk = true;       ///< with selections and weights
  bool worst = false;     ///< outputs of a fixed size, without waiting for the counts
  bool async = false;     ///< the program waits for the call's event
  bool previous = false;  ///< the call waits for an event
  int num_sms = 0;
};

class NormalModeRank {
 public:
  /// Collective. The task must outlive the object.
  explicit NormalModeRank(const RankTask& task);

  StreamHandle stream() const { return stream_; }
  Buffer& buffer() { return buffer_; }

  // Each enqueues its kernels on the stream; all but `layout` are collective.
  DispatchLayout layout();
  /// Layout, exchange of counts (the host waits for them) and dispatch.
  DispatchResult dispatch(const NormalModeCall& call);
  /// Dispatch along known routes.
  DispatchResult dispatch_again(const DispatchHandle& handle, const NormalModeCall& call);
  /// `arguments`: all but the configuration.
  CombineResult combine(CombineArguments arguments, const NormalModeCall& call);

  // Each throws Error at the first difference from what the oracle says.
  void check_rows_of(const DispatchResult& result, const NormalModeCall& call);
  /// Also selections, weights and counts, if the task's routes have them.
  void check_dispatched(const DispatchResult& result, const NormalModeCall& call);
  /// With identity experts: every token comes back as often as it was sent.
  void check_combined(const CombineResult& result);

  /// Collective; the object must not be used any more.
  void destroy();

 private:
  template <class Arguments>
  void set_rows(Arguments& arguments, bool fp8) const;
  CallOptions options(const NormalModeCall& call);
  template <class T>
  std::vector<T> fetch(const Tensor& tensor) {
    return to_host<T>(executor_, tensor.view(), stream_);
  }

  const RankTask& task_;
  const WorkloadShape& shape_;
  Executor& executor_;
  int rank_;
  OwnStream stream_;
  Buffer buffer_;
  DeviceTensor x_bf16_, x_8bit_, scales_, selection_, weights_;
};

// The cases of `deep_ep bench selftest`.

/// DeepEP's matrix: {BF16 twice, FP8; between nodes FP8 twice} x top-k x async x previous. The second of two has
/// outputs of a fixed size.
std::vector<NormalModeCall> selftest_cases(int nodes);

/// As DeepEP's tests say it: "Running with BF16, with top-k (async=False, previous=False)".
std::string name_of(const NormalModeCall& call);

/// Collective. Dispatch, dispatch along the same routes, and combine. @throws Error at the first difference from what
/// the oracle says.
void run_selftest_case(NormalModeRank& rank, const NormalModeCall& one);

}  // namespace deep_ep::tools
