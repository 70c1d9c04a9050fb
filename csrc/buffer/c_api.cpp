// deep_ep.h over buffer.hpp.
// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>

#include "deep_ep/buffer.hpp"
#include "deep_ep/deep_ep.h"
#include "deep_ep/error.hpp"

struct deep_ep_buffer {
  deep_ep::Buffer buffer;
};

/// Of one of the three calls; the others are empty.
struct deep_ep_result {
  deep_ep::DispatchResult dispatched = {};
  deep_ep::CombineResult combined = {};
  deep_ep::LowLatencyDispatchResult low_latency = {};
};

namespace {

using deep_ep::InvalidArgument;

thread_local std::string last_error;

template <class Kind>
bool is(const std::exception& error) {
  return dynamic_cast<const Kind*>(&error) != nullptr;
}

/// Classes before those that they derive from.
deep_ep_status kind_of(const std::exception& error) {
  if (is<deep_ep::RankMismatch>(error)) return DEEP_EP_RANK_MISMATCH;
  if (is<deep_ep::Unsupported>(error)) return DEEP_EP_UNSUPPORTED;
  if (is<InvalidArgument>(error)) return DEEP_EP_INVALID_ARGUMENT;
  if (is<deep_ep::OutOfMemory>(error) || is<std::bad_alloc>(error)) return DEEP_EP_OUT_OF_MEMORY;
  if (is<deep_ep::TimeoutError>(error)) return DEEP_EP_TIMEOUT;
  if (is<deep_ep::UseAfterDestroy>(error)) return DEEP_EP_DESTROYED;
  return is<deep_ep::SystemError>(error) ? DEEP_EP_SYSTEM_ERROR : DEEP_EP_ERROR;
}

/// The status of `call`. No exception crosses into the caller's language.
template <class Call>
deep_ep_status status_of(Call call) noexcept {
  try {
    call();
    return DEEP_EP_OK;
  } catch (const std::exception& error) {
    try {
      last_error = is<std::bad_alloc>(error) ? "the host has no memory" : error.what();
    } catch (const std::bad_alloc&) {
      last_error.clear();
    }
    return kind_of(error);
  }
}

template <class T>
T& given(T* pointer, const char* name) {
  if (pointer == nullptr) throw InvalidArgument(std::string(name) + " is NULL");
  return *pointer;
}

/// A structure of the caller, whose program may know fewer members; the others are zero.
template <class Struct>
Struct known(const Struct* theirs, const char* name) {
  const std::size_t size = given(theirs, name).size;
  if (size < sizeof(std::size_t) || size > sizeof(Struct)) {
    throw InvalidArgument(std::string(name) + "->size is " + std::to_string(size) + ", allowed: at most sizeof(" +
                          name + ") = " + std::to_string(sizeof(Struct)) + " of this version of the library");
  }
  Struct mine{};
  std::memcpy(&mine, theirs, size);
  return mine;
}

/// The library refuses shapes that cannot be.
deep_ep::TensorView view_of(const deep_ep_tensor* theirs, const char* name, const deep_ep::Buffer& buffer) {
  const deep_ep_tensor& tensor = given(theirs, name);
  if (tensor.dtype < DEEP_EP_BOOLEAN || tensor.dtype > DEEP_EP_FLOAT8_E5M2) {
    throw InvalidArgument(std::string(name) + ".dtype is " + std::to_string(tensor.dtype) + ", allowed: 0 to 8");
  }
  deep_ep::TensorView view;
  view.dtype = static_cast<deep_ep::DType>(tensor.dtype);
  view.device = buffer.executor().device();
  view.dims = tensor.dims;
  view.data = tensor.data;
  std::ranges::copy(tensor.shape, view.shape.begin());
  std::uint64_t stride = 1;  // wraps for a shape that cannot be
  for (int dim = std::clamp(tensor.dims, 0, deep_ep::TensorSpec::kMaxDims) - 1; dim >= 0; --dim) {
    view.strides[static_cast<std::size_t>(dim)] = static_cast<std::int64_t>(stride);
    stride *= static_cast<std::uint64_t>(std::max<std::int64_t>(view.size(dim), 1));
  }
  return view;
}

std::optional<deep_ep::ConstTensorView> optional_view(const deep_ep_tensor* tensor, const char* name,
                                                      const deep_ep::Buffer& buffer) {
  if (tensor == nullptr || (tensor->data == nullptr && tensor->dims == 0)) return {};
  return view_of(tensor, name, buffer);
}

std::shared_ptr<deep_ep::Bootstrap> bootstrap_of(const deep_ep_options& options) {
  given(options.all_gather, "options->all_gather");
  return deep_ep::make_callback_bootstrap(
      options.rank, options.num_ranks,
      [gather = options.all_gather, context = options.context](std::span<const std::byte> mine,
                                                               std::span<std::byte> all) {
        const int answer = gather(context, mine.data(), mine.size(), all.data());
        if (answer != 0) throw deep_ep::SystemError("options->all_gather returned " + std::to_string(answer));
      });
}

/// The result of `call` of the buffer in `*result`.
template <class Call>
deep_ep_status result_of(deep_ep_buffer* buffer, deep_ep_result** result, Call call) noexcept {
  return status_of([&] {
    given(result, "result") = nullptr;
    *result = new deep_ep_result(call(given(buffer, "buffer").buffer));
  });
}

}  // namespace

extern "C" {

const char* deep_ep_last_error() { return last_error.c_str(); }

size_t deep_ep_heap_bytes(int num_ranks, int64_t tokens, int64_t row_bytes, int num_topk) {
  std::size_t bytes = 0;
  status_of([&] { bytes = deep_ep::Buffer::heap_bytes_hint(num_ranks, tokens, row_bytes, num_topk); });
  return bytes;
}

size_t deep_ep_low_latency_bytes(int max_tokens, int64_t hidden, int num_ranks, int num_experts) {
  std::size_t bytes = 0;
  status_of([&] { bytes = deep_ep::Buffer::low_latency_bytes_hint(max_tokens, hidden, num_ranks, num_experts); });
  return bytes;
}

deep_ep_status deep_ep_create(const deep_ep_options* options, deep_ep_buffer** buffer) {
  return status_of([&] {
    given(buffer, "buffer") = nullptr;
    const deep_ep_options wanted = known(options, "options");
    deep_ep::BufferOptions all;
    if (wanted.heap_bytes != 0) all.heap_bytes = wanted.heap_bytes;
    if (wanted.timeout_s != 0) all.timeout_s = wanted.timeout_s;
    all.low_latency.bytes = wanted.low_latency_bytes;
    auto executor = wanted.on_cpu != 0 ? deep_ep::make_host_executor() : deep_ep::make_cuda_executor(wanted.device);
    *buffer = new deep_ep_buffer{deep_ep::Buffer(bootstrap_of(wanted), std::move(executor), all)};
  });
}

deep_ep_status deep_ep_destroy(deep_ep_buffer* buffer) {
  const std::unique_ptr<deep_ep_buffer> owned(buffer);
  return status_of([&] {
    if (owned != nullptr) owned->buffer.destroy();
  });
}

deep_ep_status deep_ep_synchronize(deep_ep_buffer* buffer) {
  return status_of([&] { given(buffer, "buffer").buffer.check(); });
}

deep_ep_status deep_ep_dispatch(deep_ep_buffer* buffer, const deep_ep_dispatch_arguments* arguments, void* stream,
                                deep_ep_result** result) {
  return result_of(buffer, result, [&](deep_ep::Buffer& of) {
    const auto theirs = known(arguments, "arguments");
    const deep_ep::CallOptions call{.stream = stream};
    deep_ep::DispatchArguments mine{.x = view_of(&theirs.x, "x", of),
                                    .x_scales = optional_view(&theirs.x_scales, "x_scales", of),
                                    .topk_idx = view_of(&theirs.topk_idx, "topk_idx", of),
                                    .topk_weights = optional_view(&theirs.topk_weights, "topk_weights", of),
                                    .num_worst_tokens = theirs.num_worst_tokens};
    const auto layout = of.get_dispatch_layout(*mine.topk_idx, theirs.num_experts, call);
    mine.use(layout);
    return deep_ep_result{.dispatched = of.dispatch(mine, call)};
  });
}

deep_ep_status deep_ep_cached_dispatch(deep_ep_buffer* buffer, const deep_ep_result* handle, const deep_ep_tensor* x,
                                       void* stream, deep_ep_result** result) {
  return result_of(buffer, result, [&](deep_ep::Buffer& of) {
    const deep_ep::DispatchArguments mine{.x = view_of(x, "x", of),
                                          .handle = &given(handle, "handle").dispatched.handle};
    return deep_ep_result{.dispatched = of.dispatch(mine, {.stream = stream})};
  });
}

deep_ep_status deep_ep_combine(deep_ep_buffer* buffer, const deep_ep_result* handle, const deep_ep_tensor* x,
                               const deep_ep_tensor* topk_weights, void* stream, deep_ep_result** result) {
  return result_of(buffer, result, [&](deep_ep::Buffer& of) {
    const deep_ep::CombineArguments mine{.x = view_of(x, "x", of),
                                         .handle = &given(handle, "handle").dispatched.handle,
                                         .topk_weights = optional_view(topk_weights, "topk_weights", of)};
    return deep_ep_result{.combined = of.combine(mine, {.stream = stream})};
  });
}

deep_ep_status deep_ep_low_latency_dispatch(deep_ep_buffer* buffer, const deep_ep_low_latency_arguments* arguments,
                                            void* stream, deep_ep_result** result) {
  return result_of(buffer, result, [&](deep_ep::Buffer& of) {
    const auto theirs = known(arguments, "arguments");
    using Format = deep_ep::LowLatencyFormat;
    const deep_ep::LowLatencyDispatchArguments mine{.x = view_of(&theirs.x, "x", of),
                                                    .topk_idx = view_of(&theirs.topk_idx, "topk_idx", of),
                                                    .max_tokens = theirs.max_tokens,
                                                    .num_experts = theirs.num_experts,
                                                    .format = theirs.use_fp8 == 0 ? Format::bf16 : Format::fp8};
    return deep_ep_result{.low_latency = of.low_latency_dispatch(mine, {.stream = stream})};
  });
}

deep_ep_status deep_ep_low_latency_combine(deep_ep_buffer* buffer, const deep_ep_result* handle,
                                           const deep_ep_tensor* x, const deep_ep_tensor* topk_idx,
                                           const deep_ep_tensor* topk_weights, const deep_ep_tensor* out,
                                           void* stream) {
  return status_of([&] {
    auto& of = given(buffer, "buffer").buffer;
    const deep_ep::LowLatencyCombineArguments mine{.x = view_of(x, "x", of),
                                                   .topk_idx = view_of(topk_idx, "topk_idx", of),
                                                   .topk_weights = view_of(topk_weights, "topk_weights", of),
                                                   .handle = &given(handle, "handle").low_latency.handle,
                                                   .out = view_of(out, "out", of)};
    of.low_latency_combine(mine, {.stream = stream});
  });
}

deep_ep_tensor deep_ep_result_tensor(const deep_ep_result* result, deep_ep_output output) {
  deep_ep_tensor tensor{};
  if (result == nullptr || output < DEEP_EP_RECV_X || output > DEEP_EP_COMBINED_WEIGHTS) return tensor;
  const auto& [normal, combined, low_latency] = *result;
  const bool is_low_latency = low_latency.recv_x.defined();
  const std::optional<deep_ep::Tensor> outputs[] = {
      is_low_latency ? low_latency.recv_x : normal.recv_x,
      is_low_latency ? low_latency.recv_x_scales : normal.recv_x_scales,
      normal.recv_topk_idx,
      normal.recv_topk_weights,
      low_latency.recv_count,
      combined.combined_x,
      combined.combined_topk_weights,
  };
  const deep_ep::TensorView mine = outputs[output].value_or(deep_ep::Tensor()).view();
  tensor.data = mine.data;
  tensor.dtype = static_cast<deep_ep_dtype>(mine.dtype);
  tensor.dims = mine.dims;
  std::copy_n(mine.shape.begin(), mine.dims, tensor.shape);
  std::copy_n(mine.strides.begin(), mine.dims, tensor.strides);
  return tensor;
}

const int* deep_ep_rows_per_expert(const deep_ep_result* result) {
  const bool counted = result != nullptr && !result->dispatched.num_recv_tokens_per_expert.empty();
  return counted ? result->dispatched.num_recv_tokens_per_expert.data() : nullptr;
}

void deep_ep_release(deep_ep_result* result) { delete result; }

}  // extern "C"
