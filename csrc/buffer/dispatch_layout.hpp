// get_dispatch_layout: counts where tokens go. It needs no peer, so it is the same within a node and between nodes.
#pragma once

#include <memory>

#include "csrc/buffer/runtime.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/layout/params.hpp"

namespace deep_ep {

class DispatchLayouts {
 public:
  explicit DispatchLayouts(Runtime& runtime);

  DispatchLayout count(const ConstTensorView& topk_idx, int num_experts, const CallOptions& call);
  /// As a part of a call that has checked its arguments. `report_unknown`: see BufferOptions::reject_unknown_experts.
  DispatchLayout count(const ConstTensorView& topk_idx, int num_experts, bool report_unknown,
                       const CallScope& scope) const;

 private:
  Runtime& runtime_;
  std::shared_ptr<LayoutWork> work_;
};

}  // namespace deep_ep
