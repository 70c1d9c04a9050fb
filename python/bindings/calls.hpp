// The arguments that Python gives to each call of a Buffer: see arguments.hpp.
#pragma once

#include <memory>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/buffer.hpp"
#include "python/bindings/arguments.hpp"

namespace deep_ep::bindings {

struct BufferSetup {
  std::shared_ptr<Bootstrap> bootstrap;
  int device = -1;                 ///< a GPU's ordinal, -1 for the CPU
  std::uintptr_t comm_stream = 0;  ///< of the framework, lives as long as the process; 0 on the CPU
  double timeout_s = -1;           ///< below 0: DEEP_EP_TIMEOUT_S
  py::object results;              ///< deep_ep.results.Results; None: results lie in the library's memory
  BufferOptions options;

  template <class With>
  void list(With& with) {
    with("bootstrap", bootstrap);
    with("device", device);
    with("heap_bytes", options.heap_bytes);
    with("window_bytes", options.window_bytes);
    with("heap_bytes_between_nodes", options.internode.heap_bytes);
    with("window_bytes_between_nodes", options.internode.window_bytes);
    with("comm_stream", comm_stream);
    with("low_latency_bytes", options.low_latency.bytes);
    with("low_latency_masking", options.low_latency.masking);
    with("allow_nvlink_for_low_latency", options.low_latency.allow_nvlink);
    with("timeout_s", timeout_s);
    with("num_qps_per_rank", options.internode.num_qps_per_rank);
    with("results", results);
  }
};

struct LayoutCall {
  static constexpr const char* kReturns =
      "Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor, Optional[EventHandle]]";
  ConstTensorView topk_idx;
  int num_experts = 0;
  CallOptions options;

  template <class With>
  void list(With& with) {
    with("topk_idx", topk_idx);
    with("num_experts", num_experts);
    with("previous_event", options.previous_event);
    with("async_finish", options.async_finish);
  }
};

struct DispatchCall {
  static constexpr const char* kReturns =
      "Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor], List[int], "
      "Tuple[torch.Tensor, ...], Optional[EventHandle]]";
  AnyTensor x;
  std::optional<TensorArgument> is_token_in_rank;  ///< goes into the handle, too
  std::optional<ConstTensorView> num_tokens_per_rank, num_tokens_per_expert;
  DispatchArguments arguments;
  CallOptions options;

  template <class With>
  void list(With& with) {
    with("x", x);
    with("x_scales", arguments.x_scales);
    with("num_tokens_per_rank", num_tokens_per_rank);
    with("is_token_in_rank", is_token_in_rank);
    with("num_tokens_per_expert", num_tokens_per_expert);
    with("topk_idx", arguments.topk_idx);
    with("topk_weights", arguments.topk_weights);
    with("expert_alignment", arguments.expert_alignment);
    with("num_worst_tokens", arguments.num_worst_tokens);
    with("num_sms", arguments.config.num_sms);
    with("previous_event", options.previous_event);
    with("async_finish", options.async_finish);
  }
};

struct CachedDispatchCall {
  static constexpr const char* kReturns = "Tuple[torch.Tensor, Optional[torch.Tensor], Optional[EventHandle]]";
  AnyTensor x;
  py::tuple handle;
  CachedDispatchArguments arguments;
  CallOptions options;

  template <class With>
  void list(With& with) {
    with("x", x);
    with("x_scales", arguments.x_scales);
    with("handle", handle);
    with("num_sms", arguments.config.num_sms);
    with("previous_event", options.previous_event);
    with("async_finish", options.async_finish);
  }
};

struct CombineCall {
  static constexpr const char* kReturns = "Tuple[torch.Tensor, Optional[torch.Tensor], Optional[EventHandle]]";
  py::tuple handle;
  CombineArguments arguments;
  CallOptions options;

  template <class With>
  void list(With& with) {
    with("x", arguments.x);
    with("handle", handle);
    with("topk_weights", arguments.topk_weights);
    with("bias_0", arguments.bias_0);
    with("bias_1", arguments.bias_1);
    with("num_sms", arguments.config.num_sms);
    with("previous_event", options.previous_event);
    with("async_finish", options.async_finish);
  }
};

struct ElasticDispatchCall {
  static constexpr const char* kReturns =
      "Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor], List[int], int, "
      "Tuple[Any, ...], Optional[EventHandle]]";
  AnyTensor x;
  ElasticDispatchArguments arguments;
  CallOptions options;

  template <class With>
  void list(With& with) {
    with("x", x);
    with("x_scales", arguments.x_scales);
    with("topk_idx", arguments.topk_idx);
    with("topk_weights", arguments.topk_weights);
    with("stats", arguments.stats);
    with("num_experts", arguments.num_experts);
    with("max_tokens", arguments.max_tokens);
    with("expert_alignment", arguments.expert_alignment);
    with("exact", arguments.exact);
    with("expand", arguments.expand);
    with("zero_padding", arguments.zero_padding);
    with("column_major_scales", arguments.column_major_scales);
    with("copy_selections", arguments.copy_selections);
    with("num_sms", arguments.config.num_sms);
    with("previous_event", options.previous_event);
    with("also_after", options.also_after);
    with("async_finish", options.async_finish);
  }
};

struct ElasticCachedDispatchCall {
  static constexpr const char* kReturns =
      "Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor], "
      "Optional[EventHandle]]";
  AnyTensor x;
  py::tuple route;
  bool indices_are_64_bit = true;
  ElasticCachedDispatchArguments arguments;
  CallOptions options;

  template <class With>
  void list(With& with) {
    with("x", x);
    with("x_scales", arguments.x_scales);
    with("topk_weights", arguments.topk_weights);
    with("route", route);
    with("metadata", arguments.metadata);
    with("source_ends", arguments.source_ends);
    with("local", arguments.local_topk_idx);
    with("expert_counts", arguments.expert_counts);
    with("max_tokens", arguments.max_tokens);
    with("expert_alignment", arguments.expert_alignment);
    with("expand", arguments.expand);
    with("num_expanded", arguments.num_expanded);
    with("indices_are_64_bit", indices_are_64_bit);
    with("column_major_scales", arguments.column_major_scales);
    with("num_sms", arguments.config.num_sms);
    with("previous_event", options.previous_event);
    with("also_after", options.also_after);
    with("async_finish", options.async_finish);
  }
};

struct ElasticCombineCall {
  static constexpr const char* kReturns = "Tuple[torch.Tensor, Optional[torch.Tensor], Optional[EventHandle]]";
  ElasticCombineArguments arguments;
  CallOptions options;

  template <class With>
  void list(With& with) {
    with("x", arguments.x);
    with("metadata", arguments.metadata);
    with("source_ends", arguments.source_ends);
    with("topk_idx", arguments.topk_idx);
    with("rows_at_owners", arguments.rows_at_owners);
    with("num_experts", arguments.num_experts);
    with("max_tokens", arguments.max_tokens);
    with("expanded", arguments.expanded);
    with("each_selection", arguments.each_selection);
    with("topk_weights", arguments.topk_weights);
    with("bias_0", arguments.bias_0);
    with("bias_1", arguments.bias_1);
    with("num_sms", arguments.config.num_sms);
    with("previous_event", options.previous_event);
    with("also_after", options.also_after);
    with("async_finish", options.async_finish);
  }
};

struct ElasticDeferredCombineCall : ElasticCombineCall {
  static constexpr const char* kReturns = "Tuple[Callable[[], Tuple[Any, ...]], Optional[EventHandle]]";
};

struct PrefetchWeightsCall {
  static constexpr const char* kReturns = "Optional[EventHandle]";
  WeightPrefetch weights;
  CallOptions options;

  template <class With>
  void list(With& with) {
    with("redundant_expert_weights", weights.redundant_expert_weights);
    with("expert_weights", weights.expert_weights);
    with("redundancy_mapping", weights.redundancy_mapping);
    with("num_sms", weights.num_sms);
    with("previous_event", options.previous_event);
    with("async_finish", options.async_finish);
  }
};

struct ReduceGradsCall {
  static constexpr const char* kReturns = "Optional[EventHandle]";
  GradReduction grads;
  CallOptions options;

  template <class With>
  void list(With& with) {
    with("redundant_expert_grads", grads.redundant_expert_grads);
    with("expert_grads", grads.expert_grads);
    with("redundancy_mapping", grads.redundancy_mapping);
    with("num_sms", grads.num_sms);
    with("previous_event", options.previous_event);
    with("async_finish", options.async_finish);
  }
};

struct LowLatencyDispatchCall {
  static constexpr const char* kReturns =
      "Tuple[Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]], torch.Tensor, Tuple[Any, ...], "
      "Optional[EventHandle], Optional[ReceiveHook]]";
  LowLatencyDispatchArguments arguments;
  CallOptions options;
  py::args given;  ///< all of them, for what must keep them

  template <class With>
  void list(With& with) {
    with("x", arguments.x);
    with("topk_idx", arguments.topk_idx);
    with("max_tokens", arguments.max_tokens);
    with("num_experts", arguments.num_experts);
    with("cumulative_local_expert_recv_stats", arguments.cumulative_local_expert_recv_stats);
    with("dispatch_wait_recv_cost_stats", arguments.wait_recv_cost_stats);
    with("use_fp8", arguments.use_fp8);
    with("round_scale", arguments.round_scale);
    with("use_ue8m0", arguments.use_ue8m0);
    with("async_finish", options.async_finish);
    with("return_recv_hook", arguments.return_recv_hook);
    with("arrival_counters", arguments.arrival_counters);
    with("arrival_rows", arguments.arrival_rows);
    with("use_nvfp4", arguments.use_nvfp4);
    with("x_global_scale", arguments.x_global_scale);
    with("align_fp8_quantization", arguments.align_fp8_quantization);
  }
};

struct LowLatencyCombineCall {
  static constexpr const char* kReturns = "Tuple[torch.Tensor, Optional[EventHandle], Optional[ReceiveHook]]";
  py::tuple handle;
  bool zero_copy = false;
  std::optional<TensorArgument> out;
  bool overlaps = false;
  LowLatencyOverlap overlap;
  LowLatencyCombineArguments arguments;
  CallOptions options;
  py::args given;  ///< all of them, for what must keep them

  template <class With>
  void list(With& with) {
    with("x", arguments.x);
    with("topk_idx", arguments.topk_idx);
    with("topk_weights", arguments.topk_weights);
    with("handle", handle);
    with("use_logfmt", arguments.use_logfmt);
    with("zero_copy", zero_copy);
    with("out", out);
    with("combine_wait_recv_cost_stats", arguments.wait_recv_cost_stats);
    with("async_finish", options.async_finish);
    with("return_recv_hook", arguments.return_recv_hook);
    with("overlaps", overlaps);
    with("signals", overlap.signals);
    with("signal_rows", overlap.signal_rows);
    with("expected", overlap.expected);
    with("num_sms", overlap.num_sms);
  }
};

}  // namespace deep_ep::bindings
