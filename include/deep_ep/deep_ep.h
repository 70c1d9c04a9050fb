/* The library for programs in C, and for other languages through their C interface: create, dispatch, combine,
 * low-latency calls. It is a thin layer over deep_ep/buffer.hpp, which has more, and says what the calls do and in
 * which order work happens. Symbols as there: R ranks, E experts, T tokens of this rank, K top-k, H hidden size, N
 * received rows, L = E / R local experts, M most tokens of a rank.
 *
 * Memory. Tensors of the caller are contiguous (strides are not read), on the buffer's device, and stay alive and
 * unchanged until the call's kernels have ended. A deep_ep_result owns the tensors that a call returns.
 *
 * Errors. A function returns DEEP_EP_OK or another status, and then deep_ep_last_error() says what was asked and what
 * is allowed; pointers to be written are NULL then. One thread at a time uses a buffer. A null buffer, result or
 * structure is DEEP_EP_INVALID_ARGUMENT.
 *
 * ABI. Structures of options and arguments begin with their size, which the caller sets to sizeof: later versions add
 * members at the end, and take smaller structures of older programs, whose new members are zero. Values of enumerations
 * stay. Zero is a valid default of each member that has a default.
 *
 * SPDX-License-Identifier: MIT */
#ifndef DEEP_EP_DEEP_EP_H
#define DEEP_EP_DEEP_EP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** What a function returns. */
typedef enum deep_ep_status {
  DEEP_EP_OK = 0,               /**< done */
  DEEP_EP_INVALID_ARGUMENT = 1, /**< an argument breaks a rule; nothing was sent */
  DEEP_EP_UNSUPPORTED = 2,      /**< this buffer cannot do it */
  DEEP_EP_RANK_MISMATCH = 3,    /**< arguments of the ranks do not fit together */
  DEEP_EP_OUT_OF_MEMORY = 4,    /**< heap or device memory is too small */
  DEEP_EP_TIMEOUT = 5,          /**< a rank did not come: destroy the buffer */
  DEEP_EP_DESTROYED = 6,        /**< the buffer was destroyed before */
  DEEP_EP_SYSTEM_ERROR = 7,     /**< the system refused a request */
  DEEP_EP_ERROR = 8             /**< anything else */
} deep_ep_status;

/** The type of an element. A boolean is a byte, 0 or 1. */
typedef enum deep_ep_dtype {
  DEEP_EP_BOOLEAN = 0,     /**< 1 byte */
  DEEP_EP_UINT8 = 1,       /**< 1 byte */
  DEEP_EP_INT32 = 2,       /**< 4 bytes */
  DEEP_EP_INT64 = 3,       /**< 8 bytes */
  DEEP_EP_FLOAT32 = 4,     /**< 4 bytes */
  DEEP_EP_BFLOAT16 = 5,    /**< 2 bytes */
  DEEP_EP_FLOAT16 = 6,     /**< 2 bytes */
  DEEP_EP_FLOAT8_E4M3 = 7, /**< 1 byte */
  DEEP_EP_FLOAT8_E5M2 = 8  /**< 1 byte */
} deep_ep_dtype;

/** Memory of up to four dimensions. Without data: no tensor. */
typedef struct deep_ep_tensor {
  void* data;          /**< the first element */
  deep_ep_dtype dtype; /**< of an element */
  int dims;            /**< 0 to 4 */
  int64_t shape[4];    /**< elements of each dimension */
  int64_t strides[4];  /**< elements from one to the next; written in results, not read in arguments */
} deep_ep_tensor;

typedef struct deep_ep_buffer deep_ep_buffer; /**< a rank's end of the communication */
typedef struct deep_ep_result deep_ep_result; /**< what a call returns */

/** Gathers `bytes` bytes of each rank into `all`, rank 0's first. Returns 0, or another number if it failed. It limits
 * its own waiting. deep_ep_create and deep_ep_destroy call it, on their thread. */
typedef int (*deep_ep_all_gather)(void* context, const void* mine, size_t bytes, void* all);

/** What deep_ep_create needs. Equal on all ranks but `rank`, `device`, `context`. */
typedef struct deep_ep_options {
  size_t size;                   /**< sizeof(deep_ep_options) */
  int rank;                      /**< 0 to num_ranks - 1 */
  int num_ranks;                 /**< R */
  deep_ep_all_gather all_gather; /**< how ranks find each other */
  void* context;                 /**< given to all_gather */
  int on_cpu;                    /**< not 0: ranks compute on the CPU, in ordinary memory */
  int device;                    /**< else the ordinal of the GPU */
  size_t heap_bytes;             /**< of normal mode: deep_ep_heap_bytes; 0: 1 GiB */
  size_t low_latency_bytes;      /**< of low-latency calls: deep_ep_low_latency_bytes; 0: none are made */
  double timeout_s;              /**< seconds that a rank is waited for; 0: DEEP_EP_TIMEOUT_S, else 100 */
} deep_ep_options;

/** A dispatch of normal mode: every token once to each rank with one of its experts. */
typedef struct deep_ep_dispatch_arguments {
  size_t size;                 /**< sizeof(deep_ep_dispatch_arguments) */
  deep_ep_tensor x;            /**< [T, H], rows of a multiple of 16 bytes */
  deep_ep_tensor x_scales;     /**< [T, S] float32 or int32, or no tensor */
  deep_ep_tensor topk_idx;     /**< [T, K] int32 or int64; what is no expert: no selection */
  deep_ep_tensor topk_weights; /**< [T, K] float32, or no tensor */
  int num_experts;             /**< E */
  int64_t num_worst_tokens;    /**< 0: the host waits for N; else the rows of the results, without a wait */
} deep_ep_dispatch_arguments;

/** A low-latency dispatch: no host wait, may be recorded into a CUDA graph. */
typedef struct deep_ep_low_latency_arguments {
  size_t size;             /**< sizeof(deep_ep_low_latency_arguments) */
  deep_ep_tensor x;        /**< [T, H] bfloat16, T <= M */
  deep_ep_tensor topk_idx; /**< [T, K] int32 or int64; what is no expert: no selection */
  int max_tokens;          /**< M, equal on all ranks */
  int num_experts;         /**< E */
  int use_fp8;             /**< not 0: rows arrive as float8_e4m3 with a float32 scale for 128 channels */
} deep_ep_low_latency_arguments;

/** A tensor of a result. */
typedef enum deep_ep_output {
  DEEP_EP_RECV_X = 0,            /**< received rows: [N, H], low latency [L, R * M, H] */
  DEEP_EP_RECV_X_SCALES = 1,     /**< their scales */
  DEEP_EP_RECV_TOPK_IDX = 2,     /**< [N, K], normal mode: index among this rank's experts, or -1 */
  DEEP_EP_RECV_TOPK_WEIGHTS = 3, /**< [N, K] float32, normal mode */
  DEEP_EP_RECV_COUNT = 4,        /**< [L] int32, low latency: rows of each local expert */
  DEEP_EP_COMBINED_X = 5,        /**< [T, H] bfloat16, of a combine */
  DEEP_EP_COMBINED_WEIGHTS = 6   /**< [T, K] float32, of a combine with weights */
} deep_ep_output;

/** The text of the last error of this thread; "" before the first one. Valid until the thread's next failing call. */
const char* deep_ep_last_error(void);

/** Bytes for deep_ep_options::heap_bytes with which a dispatch of `tokens` tokens a rank and its combine need no
 * window. 0 if a number is too small or too large. */
size_t deep_ep_heap_bytes(int num_ranks, int64_t tokens, int64_t row_bytes, int num_topk);
/** Bytes for deep_ep_options::low_latency_bytes. 0 if a number is too small or too large. */
size_t deep_ep_low_latency_bytes(int max_tokens, int64_t hidden, int num_ranks, int num_experts);

/** Collective: makes a buffer. */
deep_ep_status deep_ep_create(const deep_ep_options* options, deep_ep_buffer** buffer);
/** Collective: waits for this rank's calls and the other ranks, and frees the buffer in any case. Results stay valid.
 * NULL: nothing. */
deep_ep_status deep_ep_destroy(deep_ep_buffer* buffer);
/** Waits for all calls so far and returns the error that a kernel met. */
deep_ep_status deep_ep_synchronize(deep_ep_buffer* buffer);

/** Collective. The layout follows from topk_idx. @param stream the caller's cudaStream_t (CPU: NULL). */
deep_ep_status deep_ep_dispatch(deep_ep_buffer* buffer, const deep_ep_dispatch_arguments* arguments, void* stream,
                                deep_ep_result** result);
/** Collective: sends x, [T, H] of any dtype, where the rows of an earlier dispatch went. @param handle that dispatch's
 * result. */
deep_ep_status deep_ep_cached_dispatch(deep_ep_buffer* buffer, const deep_ep_result* handle, const deep_ep_tensor* x,
                                       void* stream, deep_ep_result** result);
/** Collective: adds for each token the rows of its ranks. @param handle the dispatch's result.
 * @param x [N, H] bfloat16. @param topk_weights [N, K] float32, or NULL. */
deep_ep_status deep_ep_combine(deep_ep_buffer* buffer, const deep_ep_result* handle, const deep_ep_tensor* x,
                               const deep_ep_tensor* topk_weights, void* stream, deep_ep_result** result);
/** Collective. The buffer needs low_latency_bytes. */
deep_ep_status deep_ep_low_latency_dispatch(deep_ep_buffer* buffer, const deep_ep_low_latency_arguments* arguments,
                                            void* stream, deep_ep_result** result);
/** Collective: adds each token's weighted rows. @param handle the dispatch's result. @param x [L, R * M, H] bfloat16,
 * rows in their places of recv_x. @param topk_idx as dispatched. @param topk_weights [T, K] float32.
 * @param out [T, H] bfloat16, written: the sums. */
deep_ep_status deep_ep_low_latency_combine(deep_ep_buffer* buffer, const deep_ep_result* handle,
                                           const deep_ep_tensor* x, const deep_ep_tensor* topk_idx,
                                           const deep_ep_tensor* topk_weights, const deep_ep_tensor* out, void* stream);

/** A tensor of a result, valid until deep_ep_release; no tensor if the call has none of this kind. */
deep_ep_tensor deep_ep_result_tensor(const deep_ep_result* result, deep_ep_output output);
/** Rows that each of the L local experts received, of a dispatch that waited for them; NULL otherwise. */
const int* deep_ep_rows_per_expert(const deep_ep_result* result);
/** Frees a result; work that the call's stream holds now may still use its memory. NULL: nothing. */
void deep_ep_release(deep_ep_result* result);

#ifdef __cplusplus
}
#endif
#endif
